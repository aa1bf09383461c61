"""Tokens that all tensor ranks have: each goes on with its part, and they come together again.

DeepSpeed: deepspeed/moe/mappings.py.
"""

from torch import Tensor

from refimpl.deepspeed.utils import groups
from refimpl.parallel import conjugates


def drop_tokens(input_: Tensor, dim: int = 0) -> Tensor:
    """x, equal on all tensor ranks -> this rank's part along `dim`. ValueError if there are no equal parts."""
    return conjugates.scatter(input_, groups.laid_out().tensor, dim)


def gather_tokens(input_: Tensor, dim: int = 0) -> Tensor:
    """This rank's part -> all of them, on all tensor ranks; a collective."""
    return conjugates.gather(input_, groups.laid_out().tensor, dim)
