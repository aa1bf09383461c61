"""Warm-up, then constant, linear decay or cosine: Adam's second moment needs some steps before full rates are safe.

Symbols: k counts steps from -1 (see `schedule_base`); W = warmup_num_steps, at least 2; T = total_num_steps;
warm(k) = log(k + 1) / log(W) for "log" (the default), k / W for "linear". So 0 steps, which transformers' Trainer asks
for unless it is told otherwise, are 2, as in DeepSpeed before 0.19.7, which refuses 0.
DeepSpeed's file, whose argument names, defaults and values these are: deepspeed/runtime/lr_schedules.py.
"""

import math
import warnings
from typing import Literal

import torch

from refimpl.optim.schedule_base import Rate, Schedule, per_group, whole

Warming = Literal["log", "linear"]


class WarmupLR(Schedule):
    """lr(k) = min + (max - min) * (warm(k) if k < W else 1).

    Without `warmup_max_lr` the maximum is each group's own rate. Raises ValueError for an unknown `warmup_type` (where
    DeepSpeed falls back to "log"), a `warmup_num_steps` that is negative or not whole, or another number of rates than
    groups.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup_min_lr: Rate = 0.0,
        warmup_max_lr: Rate | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: Warming = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.warmup_num_steps, self.warmup_type = _warmup(warmup_num_steps, warmup_type)
        if warmup_max_lr is None:
            warmup_max_lr = [float(group["lr"]) for group in optimizer.param_groups]
        self.min_lrs = per_group(optimizer, warmup_min_lr, "warmup_min_lr")
        self.max_lrs = per_group(optimizer, warmup_max_lr, "warmup_max_lr")
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float]:
        """The formula at `last_batch_iteration`."""
        gamma = self.gamma(self.last_batch_iteration)
        return [low + (high - low) * gamma for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def gamma(self, k: int) -> float:
        """The part of max - min that is reached."""
        return warm(k, self.warmup_num_steps, self.warmup_type) if k < self.warmup_num_steps else 1.0


class WarmupDecayLR(WarmupLR):
    """lr(k) = min + (max - min) * (warm(k) if k < W else max(0, (T - k) / max(1, T - W)))."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_lr: Rate = 0.0,
        warmup_max_lr: Rate | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: Warming = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        warmup, _ = _warmup(warmup_num_steps, warmup_type)
        self.total_num_steps = _total(total_num_steps, warmup)
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup, warmup_type, last_batch_iteration)

    def gamma(self, k: int) -> float:
        """The part of max - min that is reached, or still left."""
        if k < self.warmup_num_steps:
            return super().gamma(k)
        return max(0.0, (self.total_num_steps - k) / max(1, self.total_num_steps - self.warmup_num_steps))


class WarmupCosineLR(Schedule):
    """lr(k) = the group's own rate * ratio(k), with r = warmup_min_ratio and c = cos_min_ratio:

    ratio(-1) = 0; ratio(k < W) = r + (1 - r) * warm(k);
    ratio(k >= W) = c + (1 - c) * (1 + cos(pi * min(1, (k - W + 1) / max(1, T - W)))) / 2.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: Warming = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.warmup_num_steps, self.warmup_type = _warmup(warmup_num_steps, warmup_type)
        self.total_num_steps = _total(total_num_steps, self.warmup_num_steps)
        self.warmup_min_ratio = warmup_min_ratio
        self.cos_min_ratio = cos_min_ratio
        self.org_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float]:
        """The formula at `last_batch_iteration`."""
        ratio = self.get_lr_ratio()
        return [rate * ratio for rate in self.org_lrs]

    def get_lr_ratio(self) -> float:
        """ratio(k)."""
        k, warmup = self.last_batch_iteration, self.warmup_num_steps
        if k < 0:
            return 0.0
        if k < warmup:
            low, part = self.warmup_min_ratio, warm(k, warmup, self.warmup_type)
        else:
            progress = min(1.0, (k - warmup + 1) / max(1, self.total_num_steps - warmup))
            low, part = self.cos_min_ratio, (1 + math.cos(math.pi * progress)) / 2
        return low + (1 - low) * part


def warm(k: int, steps: int, kind: Warming) -> float:
    """The part of a warm-up of `steps` steps that is done after step k: from 0 towards 1."""
    if k < 0:
        return 0.0
    return k / steps if kind == "linear" else math.log(k + 1) / math.log(steps)


def _warmup(steps: int, kind: Warming) -> tuple[int, Warming]:
    if kind not in ("log", "linear"):
        raise ValueError(f"warmup_type must be 'log' or 'linear', not {kind!r}")
    return max(2, whole("warmup_num_steps", steps)), kind


def _total(total: int, warmup: int) -> int:
    total = whole("total_num_steps", total, least=1)
    if total < warmup:
        warnings.warn(
            f"total_num_steps {total} is less than warmup_num_steps {warmup}: no steps to decay in", stacklevel=3
        )
    return total
