"""Ranks beyond the data-parallel ones: those that hold other parts of the same model, as the stages of a pipeline do.

The norm of the gradient is the whole model's: every part is clipped by one factor, and a value that is not finite in
any part skips the update of all. A parameter of which several parts have a copy, such as tied weights, counts once.
Traffic: one number more a step. DeepSpeed: deepspeed/runtime/utils.py, get_global_norm over the `mpu`.
"""

from dataclasses import dataclass

import torch
from torch import nn

from refimpl.comm.group import Group


@dataclass(frozen=True)
class Beyond:
    """The other parts of this rank's replica of the model, and which of its parameters another part counts."""

    group: Group
    counted_elsewhere: frozenset[nn.Parameter]

    def all_squares(self, mine: float) -> float:
        """The sum of squares of all parts, the same on every rank; `mine` is this part's. A collective."""
        message = torch.tensor([mine], dtype=torch.float64, device=self.group.device)
        self.group.all_reduce(message, "sum", tag="norm")
        self.group.settle()
        return float(message.item())
