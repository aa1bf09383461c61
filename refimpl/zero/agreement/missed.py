"""Which parameters a step has no gradient of, and whose fault it is: a number each, in the norm's message.

    on this rank p               adds     over N ranks the sum is
    has a gradient               0        < N         some have one: the others count as zero in the mean, as in torch
    was not used                 1        N           none has: the optimizer leaves p alone
    is frozen, so has none       4096     of both     some have one, and some have frozen it: an error

Frozen: `requires_grad` was False in every backward since the last step that brought this rank a gradient. On one rank
alone that is a mistake, and would be another mean in silence; unused on one rank alone is an expert, or a branch. What
was frozen in some of those backwards is compared by `Alike`.
"""

import torch
from torch import Tensor

from refimpl.comm.group import Group
from refimpl.comm.streams import told

FROZEN = 4096  # more than there are ranks


def without(total: float) -> float:
    """How many ranks have no gradient, of the sum for one parameter."""
    return total // FROZEN + total % FROZEN


def is_parted(total: float, ranks: int) -> bool:
    """Whether some of so many ranks have frozen the parameter, while others have a gradient."""
    return total >= FROZEN and without(total) < ranks


def summed(group: Group, words: list[int]) -> Tensor:
    """The sums over the ranks of `group`, fp64. A collective."""
    message = told(words, torch.float32, group.device)
    group.all_reduce(message, "sum", tag="norm")
    return message.double()
