"""The clock: wall time by name, the median taken after a warm-up.

A median, because on a shared machine the slow steps are not the code's; after a warm-up, because the first steps pay
for page faults, kernel selection and the building of buckets. On CUDA the host only queues work, so each interval
begins and ends with a synchronisation: the times are true, and overlap between two named intervals is lost.
DeepSpeed's counterpart: deepspeed/utils/timer.py (SynchronizedWallClockTimer, ThroughputTimer).
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

import torch


def now(device: torch.device) -> float:
    """Seconds, once all that was queued on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Clock:
    """`with clock.time("forward"): ...` adds one interval, in milliseconds, to `clock.ms["forward"]`."""

    def __init__(self, device: torch.device | str = "cpu", warmup: int = 0) -> None:
        """`warmup`: how many of the first intervals of each name the statistics leave out."""
        self.device, self.warmup = torch.device(device), warmup
        self.ms: dict[str, list[float]] = {}

    @contextmanager
    def time(self, name: str = "step") -> Iterator[None]:
        """Measure the block. A block that raises is not recorded. Different names may nest."""
        begun = now(self.device)
        yield
        self.ms.setdefault(name, []).append((now(self.device) - begun) * 1e3)

    def median(self, name: str = "step") -> float:
        """Median milliseconds of an interval after the warm-up. ValueError if there is none."""
        intervals = self.ms.get(name, [])
        if len(intervals) <= self.warmup:
            raise ValueError(f"clock: {name!r} has {len(intervals)} intervals, and the first {self.warmup} are warm-up")
        return median(intervals[self.warmup :])

    def drain(self) -> dict[str, float]:
        """Milliseconds by name, summed since the last drain (warm-up included): one line of a breakdown."""
        totals = {name: sum(intervals) for name, intervals in self.ms.items()}
        self.ms.clear()
        return totals
