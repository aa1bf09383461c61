"""One cycle of the learning rate, and the range test that finds its bounds.

Smith, arXiv:1803.09820. k counts steps from -1 (see `schedule_base`).
DeepSpeed's file, whose argument names, defaults and values these are: deepspeed/runtime/lr_schedules.py.
"""

import math
import warnings

import torch

from refimpl.optim.schedule_base import Rate, Schedule, per_group, whole


class LRRangeTest(Schedule):
    """lr(k) = min * (1 + rate * x), x = (k + 1) / size, rounded down when `lr_range_test_staircase`.

    Let the rate grow until the loss diverges, then train a little below.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        lr_range_test_min_lr: Rate = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        self.min_lr = per_group(optimizer, lr_range_test_min_lr, "lr_range_test_min_lr")
        self.step_size = whole("lr_range_test_step_size", lr_range_test_step_size, least=1)
        self.step_rate = lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float]:
        """The formula at `last_batch_iteration`."""
        interval = (self.last_batch_iteration + 1) / self.step_size
        if self.staircase:
            interval = math.floor(interval)
        return [low * (1 + self.step_rate * interval) for low in self.min_lr]


class OneCycle(Schedule):
    """Up for `cycle_first_step_size` steps, down for `cycle_second_step_size`, then decay; momentum mirrors the rate.

    With i = k + 1, F and S the two sizes (S = F where it is not given), C = F + S and j = i mod C:
    scale = j / F if j <= F else (C - j) / S, rounded down to a multiple of 1 / stair_count where one is given;
    k < C:  lr = min + (max - min) * scale, momentum = max - (max - min) * scale;
    k >= C: lr = min / (1 + decay_lr_rate * n), momentum = max * (1 + decay_mom_rate * n), n = (i - C) / decay_step_size
    (n = 0 when decay_step_size is 0). Rates and momenta are one for all parameter groups, or a list with one for each.
    Momentum is betas[0], with betas[1] set to 0.99, or SGD's and Muon's momentum, which DeepSpeed leaves alone.
    Construction writes the smallest momentum into the optimizer, as DeepSpeed does; `get_mom()` already gives the
    formula's.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        cycle_min_lr: Rate,
        cycle_max_lr: Rate,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: Rate = 0.8,
        cycle_max_mom: Rate = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        second_size = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        second_stairs = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        self.first_step_size = whole("cycle_first_step_size", cycle_first_step_size, least=1)
        self.second_step_size = whole("cycle_second_step_size", second_size)
        self.first_stair_count = whole("cycle_first_stair_count", cycle_first_stair_count)
        self.second_stair_count = whole("cycle_second_stair_count", second_stairs)
        self.decay_step_size = whole("decay_step_size", decay_step_size)
        self.total_size = self.first_step_size + self.second_step_size
        self.step_ratio = self.first_step_size / self.total_size
        self.min_lrs = per_group(optimizer, cycle_min_lr, "cycle_min_lr")
        self.max_lrs = per_group(optimizer, cycle_max_lr, "cycle_max_lr")
        self.min_moms = per_group(optimizer, cycle_min_mom, "cycle_min_mom")
        self.max_moms = per_group(optimizer, cycle_max_mom, "cycle_max_mom")
        self.decay_lr_rate, self.decay_mom_rate = decay_lr_rate, decay_mom_rate
        self.cycle_momentum = cycle_momentum
        if cycle_momentum and not any("betas" in g or g.get("momentum") for g in optimizer.param_groups):
            warnings.warn(f"OneCycle: {type(optimizer).__name__} has no momentum to cycle", stacklevel=2)
            self.cycle_momentum = False
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float]:
        """The formula at `last_batch_iteration`."""
        if self.last_batch_iteration < self.total_size:
            scale = self._scale()
            return [low + (high - low) * scale for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]
        return [low / (1 + self.decay_lr_rate * self._decay_intervals()) for low in self.min_lrs]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """betas at `last_batch_iteration`, one pair for each parameter group; None when momentum is not cycled."""
        if not self.cycle_momentum:
            return None
        if self.last_batch_iteration < self.total_size:
            scale = self._scale()
            moms = [high - (high - low) * scale for low, high in zip(self.min_moms, self.max_moms, strict=True)]
        else:
            moms = [high * (1 + self.decay_mom_rate * self._decay_intervals()) for high in self.max_moms]
        return [(momentum, 0.99) for momentum in moms]

    def apply(self) -> None:
        """Write rate and momentum of `last_batch_iteration` into the optimizer."""
        super().apply()
        betas = self.get_mom()
        if betas is None:
            return
        if self.last_batch_iteration < 0:
            betas = [(momentum, 0.99) for momentum in self.min_moms]
        for group, pair in zip(self.optimizer.param_groups, betas, strict=True):
            if "betas" in group and not group.get("use_muon"):
                group["betas"] = pair
            elif group.get("momentum"):
                group["momentum"] = pair[0]

    def _scale(self) -> float:
        place = (self.last_batch_iteration + 1) % self.total_size
        if place <= self.first_step_size:
            rise, size, stairs = place, self.first_step_size, self.first_stair_count
        else:
            rise, size, stairs = self.total_size - place, self.second_step_size, self.second_stair_count
        return rise / size if stairs == 0 else math.floor(rise * stairs / size) / stairs

    def _decay_intervals(self) -> float:
        if self.decay_step_size == 0:
            return 0.0
        return (self.last_batch_iteration - self.total_size + 1) / self.decay_step_size
