"""What the tests of the algorithms hand to each rank, and how they compare."""

import torch
from torch import Tensor

from refimpl.comm.collectives import Op

SIZES = (0, 1, 7, 250)


def given(rank: int, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """[n], other numbers on each rank, of magnitudes that round."""
    values = torch.randn(n, generator=torch.Generator().manual_seed(rank)) * 1000
    return values.to(dtype)


def everyone(ranks: int, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """[N, n]"""
    return torch.stack([given(r, n, dtype) for r in range(ranks)])


def reduced(rows: Tensor, op: Op) -> Tensor:
    """[N, n] -> [n] in float64."""
    rows = rows.double()
    return rows.amax(0) if op == "max" else rows.mean(0) if op == "mean" else rows.sum(0)


def agrees(actual: Tensor, rows: Tensor, op: Op) -> bool:
    """Whether `actual` is the reduction of rows, within a rounding of its own dtype for each addition."""
    if not actual.is_floating_point():
        return torch.equal(actual.double(), reduced(rows, op))
    bound = len(rows) * torch.finfo(actual.dtype).eps * rows.double().abs().sum(0)
    return bool(((actual.double() - reduced(rows, op)).abs() <= bound).all())
