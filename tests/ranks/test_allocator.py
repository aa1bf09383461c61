"""Memory that a rank frees is there for its next allocation: no page is faulted in again."""

import resource
import sys

import pytest
import torch

from refimpl import launch
from refimpl.ranks.allocator import keep_freed_memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")


def faults() -> list[int]:
    """Page faults in each of ten steps that fill and free eight buffers, as ZeRO-3 does with its units."""
    buffers = [torch.empty(1_000_000 + 100_000 * i) for i in range(8)]
    counts = []
    for _ in range(10):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for i, buffer in enumerate(buffers):
            buffer.untyped_storage().resize_(4 * buffer.numel())
            buffer.fill_(1)
            if i:
                buffers[i - 1].untyped_storage().resize_(0)
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return counts


def test_a_rank_keeps_what_it_frees() -> None:
    for first, *_, last in launch.run(faults, device="cpu"):
        assert first > 100  # with huge pages one fault is 512 small ones
        assert last < first / 100  # the heap has settled after six of them at most


def test_a_users_own_setting_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    assert launch.run(keep_freed_memory, device="cpu") == [False, False]
