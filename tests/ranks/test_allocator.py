"""Memory that a rank frees is there for its next allocation: no page is faulted in again."""

import resource
import sys

import pytest
import torch

from refimpl import launch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")


def faults() -> list[int]:
    """Page faults of this process at each of five allocations of 64 MiB, all written to and freed."""
    counts = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.empty(2**24).fill_(1)
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return counts


def test_a_rank_keeps_what_it_frees() -> None:
    for first, *_, last in launch.run(faults, device="cpu"):
        assert first > 100  # huge pages would be 32
        assert last < first / 10


def test_a_users_own_setting_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    for first, *_, last in launch.run(faults, device="cpu"):
        assert last > first / 2
