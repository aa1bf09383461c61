"""What an engine tells: metrics to the monitors after every step, a few lines on rank 0 every steps_per_print steps.

Metrics have DeepSpeed's names and are plotted over samples: Train/Samples/train_loss, lr, loss_scale. The loss is the
mean over the step's micro-batches and all ranks (DeepSpeed's is rank 0's own). Without steps_per_print nothing is
printed, except that a breakdown that was asked for is then printed at every step.
DeepSpeed's counterparts: `_report_progress`, utils/timer.py and `see_memory_usage`.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from refimpl.comm.group import Group
from refimpl.engine.build import Parts
from refimpl.measure.clock import Clock
from refimpl.measure.flops import FlopsProfiler
from refimpl.measure.memory import MemoryMeter


class Report:
    """Collects times, bytes and losses of the step under way, and hands them on when it is done."""

    def __init__(self, parts: Parts) -> None:
        self.config, self.group, self.stage, self.monitor = parts.config, parts.group, parts.stage, parts.monitor
        self.prints = parts.axes.world.rank == 0
        self.clock = Clock(self.group.device)
        self.meter = MemoryMeter(self.stage.tensors)
        self.profiler: FlopsProfiler | None = None  # once it has counted
        self._losses: list[Tensor] = []  # this rank's, detached, one a micro-batch
        self._before: dict[str, int] = {}  # bytes by class before the update
        # Rank 0 writes, and its configuration may be the only one that says so; every rank adds its loss to the mean.
        self.watched = any(self.group.all_gather_object(self.config.monitor_config.enabled))
        breakdown = self.config.wall_clock_breakdown or self.config.memory_breakdown
        self.every = self.config.steps_per_print or (1 if breakdown else None)

    def time(self, name: str) -> AbstractContextManager[None]:
        """Measure a block for the wall-clock breakdown, if there is one."""
        return self.clock.time(name) if self.config.wall_clock_breakdown else nullcontext()

    def flops(self, model: nn.Module, step: int, what: str) -> AbstractContextManager[None]:
        """Count the FLOPs of a block, `what`, if it is the first one after the `step` that `flops_profiler` names."""
        asked = self.config.flops_profiler
        due = asked.enabled and self.prints and step == asked.profile_step and model.training and self.profiler is None
        return self._profile(model, what) if due else nullcontext()

    @contextmanager
    def _profile(self, model: nn.Module, what: str) -> Iterator[None]:
        asked = self.config.flops_profiler
        self.profiler = profiler = FlopsProfiler(model, recompute_fwd_factor=asked.recompute_fwd_factor)
        profiler.start_profile()
        try:
            yield
        finally:
            profiler.stop_profile()
        how = asked.module_depth, asked.top_modules, asked.detailed, asked.output_file
        profiler.print_model_profile(asked.profile_step, *how, what)

    def loss(self, loss: Tensor) -> None:
        """Remember the loss of a micro-batch."""
        if self.watched:
            self._losses.append(loss.detach())

    def forget(self) -> None:
        """The losses since the last update: their micro-batches count no more."""
        self._losses.clear()

    def before_update(self) -> None:
        """Count the bytes while the gradients are there."""
        if self.config.memory_breakdown:
            self._before = self.meter.now()

    def after_update(self, step: int, samples: int, rates: Callable[[], list[float | None]]) -> None:
        """Hand on optimizer step number `step`, after `samples` samples in all.

        `rates` gives a learning rate a group: asked where it is told, as one that is a tensor on a GPU makes the host
        wait.
        """
        if self.watched:
            lr = rates()[0]
            events = [] if lr is None else [("lr", lr)]
            if self._losses:
                events.insert(0, ("train_loss", mean_loss(self.group, self._losses).item()))
            if self.stage.scaler is not None:
                events.append(("loss_scale", self.stage.scaler.scale))
            self.monitor.write([(f"Train/Samples/{name}", value, samples) for name, value in events])
            self._losses.clear()
        if self.every is not None and step % self.every == 0:
            self._print(step, rates, self.every)

    def _print(self, step: int, rates: Callable[[], list[float | None]], every: int) -> None:
        times = self.clock.drain()
        if not self.prints:
            return
        if self.config.steps_per_print is not None:
            print(f"step={step}, skipped={self.stage.skipped_steps}, lr={rates()}")
        if self.config.wall_clock_breakdown:
            print("time (ms a step) | " + " | ".join(f"{name}: {ms / every:.2f}" for name, ms in times.items()))
        if self.config.memory_breakdown:
            for when, sizes in (("before", self._before), ("after", self.meter.now())):
                print(f"bytes {when} step | " + " | ".join(f"{name}: {size}" for name, size in sizes.items()))


def mean_loss(group: Group, losses: list[Tensor]) -> Tensor:
    """Mean over these micro-batches and all ranks: fp32 scalar, detached."""
    mean = torch.stack([loss.detach().float().reshape(()) for loss in losses]).mean()
    group.all_reduce(mean.view(1), "mean", tag="loss")
    return mean
