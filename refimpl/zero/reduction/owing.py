"""Who keeps what was not sent yet, and how that goes through a checkpoint: one way for all kinds of compression.

    `Compressed`      DDP's and ZeRO-1's compressed gradients
    `Means`           the momenta of 1-bit optimizers
    `MovingErrors`    ZeRO-3's quantised gradients with LoCo

A stage has one of them at most, its `owing`. An error is a rank's own, of its own gradients: it goes on bit for bit on
the same rank of as many, and begins at zero on others, with a warning. (Added up over ranks and dealt out anew it would
be as right in the sum, and as large as what compression saves.)
"""

import warnings
from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from refimpl.comm.group import Group


class Owing(Protocol):
    """What a stage's `state_dict` has under "compression", and the engine's checkpoint too."""

    def state_dict(self) -> dict[str, Any]:
        """This rank's errors, copied or not; with `place`'s keys."""

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """The inverse; None: nothing was saved. Errors begin at zero where they are not of this place."""

    def tensors(self) -> list[Tensor]:
        """The memory kept between steps."""


def place(group: Group) -> dict[str, int]:
    """Whose errors these are."""
    return {"rank": group.rank, "ranks": group.size}


def warn_of_loss(group: Group, what: str, saved: str, here: str) -> None:
    """Say on one rank that errors are dropped."""
    if group.rank == 0:
        warnings.warn(
            f"{what}: the saved errors are of {saved}, here are {here}: error feedback begins at zero, what was not "
            "sent yet is lost",
            stacklevel=3,
        )
