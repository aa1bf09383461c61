"""A learning-rate schedule is a closed formula of one integer, the number of steps taken.

That integer, `last_batch_iteration` k, is -1 before the first `step()` and 0 after it: it is the whole state, and any
step can be resumed. Construction writes the rates of k = -1 into the optimizer; `step()` comes after the optimizer's.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

Rate = float | Sequence[float]  # one for all parameter groups, or one for each


class Schedule(ABC):
    """What all schedules share: the counter, writing rates into the optimizer, and saving."""

    def __init__(self, optimizer: torch.optim.Optimizer, last_batch_iteration: int) -> None:
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration
        if last_batch_iteration == -1:
            self.apply()

    @abstractmethod
    def get_lr(self) -> list[float]:
        """The formula at `last_batch_iteration`: one rate for each parameter group."""

    def apply(self) -> None:
        """Write the rates of `last_batch_iteration` into the optimizer; a rate kept in a tensor stays in it.

        ValueError if the optimizer was given another parameter group since.
        """
        rates, groups = self.get_lr(), self.optimizer.param_groups
        if len(rates) != len(groups):
            raise ValueError(
                f"{type(self).__name__} was made for {len(rates)} parameter groups, the optimizer has {len(groups)} now"
                ": make another, with last_batch_iteration of this one"
            )
        for group, rate in zip(groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def step(self, last_batch_iteration: int | None = None) -> None:
        """One step further, or to the given one."""
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        )
        self.apply()

    def get_last_lr(self) -> list[float]:
        """The rates that the optimizer holds, one for each parameter group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """The counter."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`, with its rates in the optimizer."""
        self.last_batch_iteration = state["last_batch_iteration"]
        self.apply()


def per_group(optimizer: torch.optim.Optimizer, rate: Rate, name: str) -> list[float]:
    """`rate` for each parameter group; ValueError for another number of rates than groups."""
    count = len(optimizer.param_groups)
    rates = [rate] * count if isinstance(rate, int | float) else list(rate)
    if len(rates) != count:
        raise ValueError(f"{name} has {len(rates)} values for {count} parameter groups")
    return rates


def whole(name: str, value: float, least: int = 0) -> int:
    """`value` as a count of steps; ValueError where it is not one."""
    if not isinstance(value, int | float) or value != value // 1 or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, not {value!r}")
    return int(value)
