"""A sum of squares in fp64, for the norms of gradients and of weights, which ranks hold in parts and add up.

Beside x a CPU needs 8 bytes an element of one block, a GPU nothing: its kernel widens what it reads.
"""

import torch
from torch import Tensor

BLOCK = 1 << 16  # elements widened at a time, so that the copy stays in cache


def squared(x: Tensor, exact: bool = True) -> Tensor:
    """x of any shape -> its sum of squares, fp64; squared in fp32 unless `exact`."""
    if x.device.type != "cpu":
        (norm,) = torch._foreach_norm([x], dtype=torch.float64)  # vector_norm would widen all of x before the kernel
        return norm.square()
    total = torch.zeros((), dtype=torch.float64)
    for block in torch.split(x.reshape(-1), BLOCK):
        wide = block.to(torch.float64 if exact else torch.float32)
        total += torch.dot(wide, wide)
    return total
