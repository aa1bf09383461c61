"""Memory that a rank frees is there for its next allocation: no page is faulted in again."""

import resource
import sys
from pathlib import Path

import pytest
import torch

from refimpl import launch
from refimpl.ranks.allocator import keep_freed_memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")


def faults() -> tuple[int, int]:
    """Pages that ten steps fault in, which fill and free eight buffers as ZeRO-3 does, and how many the rank gained."""
    sizes = [4 * (1_000_000 + 100_000 * i) for i in range(8)]
    buffers = [torch.empty(0) for _ in sizes]
    before, resident = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, pages()
    for _ in range(10):
        for i, buffer in enumerate(buffers):
            buffer.untyped_storage().resize_(sizes[i])
            buffer.untyped_storage().fill_(1)
            if i:
                buffers[i - 1].untyped_storage().resize_(0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, pages() - resident


def pages() -> int:
    """That this process has in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1])


def test_a_rank_keeps_what_it_frees() -> None:
    """How many steps the heap takes to settle is its own affair (once more than nine): no page comes twice."""
    for faulted, grown in launch.run(faults, device="cpu"):
        assert grown > 100
        assert faulted < 1.1 * grown  # far fewer with huge pages


def test_a_users_own_setting_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    assert launch.run(keep_freed_memory, device="cpu") == [False, False]
