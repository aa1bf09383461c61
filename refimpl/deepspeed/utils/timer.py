"""Timers by name, the average of DeepSpeed's tables, the engine's `tput_timer`. DeepSpeed: deepspeed/utils/timer.py."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from refimpl.deepspeed.accelerator import get_accelerator
from refimpl.measure.clock import now
from refimpl.measure.comms_log import trim_mean
from refimpl.measure.throughput import ThroughputTimer

__all__ = ["SynchronizedWallClockTimer", "ThroughputTimer", "trim_mean"]

# Names of timers that Megatron-DeepSpeed's zero-bubble pipeline imports.
BACKWARD_MICRO_TIMER, BACKWARD_GLOBAL_TIMER = "bwd_microstep", "bwd"
BACKWARD_INNER_MICRO_TIMER, BACKWARD_INNER_GLOBAL_TIMER = "bwd_inner_microstep", "bwd_inner"


class NamedTimer:
    """What lies between `start` and `stop`, in milliseconds; both wait for the device first."""

    def __init__(self, name: str) -> None:
        self.name_, self.started_ = name, False
        self._begun = 0.0
        self._ms: list[float] = []

    def start(self) -> None:
        """RuntimeError if it runs."""
        if self.started_:
            raise RuntimeError(f"timer {self.name_!r} runs: call stop() before the next start()")
        self._begun, self.started_ = _now(), True

    def stop(self, reset: bool = False, record: bool = False) -> None:
        """Keep one interval. RuntimeError if it does not run. DeepSpeed uses neither argument."""
        if not self.started_:
            raise RuntimeError(f"timer {self.name_!r} does not run: call start() before stop()")
        self._ms.append((_now() - self._begun) * 1e3)
        self.started_ = False

    def reset(self) -> None:
        """Forget all, an interval under way too."""
        self.started_ = False
        self._ms.clear()

    def elapsed(self, reset: bool = True) -> float:
        """Milliseconds of all intervals since the last reset; one under way counts up to now, and goes on."""
        if running := self.started_:
            self.stop()
        total = sum(self._ms)
        if reset:
            self.reset()
        if running:
            self.start()
        return total

    def mean(self) -> float:
        """Milliseconds of an interval, a tenth at either end left out; 0 of none."""
        return trim_mean(self._ms, 0.1)


class SynchronizedWallClockTimer:
    """`timers("forward").start()`: the timer of a name, made when it is first asked for."""

    Timer = NamedTimer

    def __init__(self) -> None:
        self.timers: dict[str, NamedTimer] = {}

    def __call__(self, name: str) -> NamedTimer:
        return self.timers.setdefault(name, NamedTimer(name))

    def get_timers(self) -> dict[str, NamedTimer]:
        return self.timers

    @staticmethod
    def memory_usage() -> str:
        """A line of the device's memory, in GiB."""
        device = get_accelerator()
        here, most = device.memory_allocated() / 2**30, device.max_memory_allocated() / 2**30
        return f" | mem_allocated: {here:.4f} GB | max_mem_allocated: {most:.4f} GB"

    def log(
        self,
        names: Sequence[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Print milliseconds / `normalizer` of those that are there, on `ranks` (without: rank 0)."""
        known = [(name, self.timers[name].elapsed(reset) / normalizer) for name in names if name in self.timers]
        line = "time (ms)" + "".join(f" | {name}: {ms:.2f}" for name, ms in known)
        if not dist.is_initialized() or dist.get_rank() in (ranks or [0]):
            print(line + (self.memory_usage() if memory_breakdown else ""), flush=True)

    def get_mean(self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """Microseconds of an interval / `normalizer`, by name: DeepSpeed takes its milliseconds for seconds."""
        return {name: self.timers[name].mean() * 1e3 / normalizer for name in names if name in self.timers}


def _now() -> float:
    return now(torch.device(get_accelerator().current_device_name()))
