"""The contract of torch's `step`, once: what an optimizer of this folder writes is `update` of what has a gradient."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor

Moved = list[tuple[Tensor, dict[str, Any]]]  # parameters, each with its group


class Base(torch.optim.Optimizer, ABC):
    """An optimizer whose `update` is called without autograd."""

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient; returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.update([(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None])
        return loss

    @abstractmethod
    def update(self, moved: Moved) -> None:
        """Move these parameters by their gradients."""
