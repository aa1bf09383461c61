"""Numbers on a grid of few levels, with a gradient that passes as if they had not been rounded.

Rounding is flat almost everywhere, so that its true derivative would stop all training. The straight-through estimator
(Bengio et al. 2013, arXiv:1308.3432) calls it 1: forward computes with the rounded number, backward moves
the one it was made of. Each row of x [groups, n] has its own scale:

    bits >= 3, symmetric    step = 2 max|x| / 2^bits, levels -2^(bits-1) .. 2^(bits-1) - 1; 0 is a level
    bits >= 3, asymmetric   step = (max - min) / 2^bits, levels 0 .. 2^bits - 1 above the least
    2 bits                  -a, 0, a: 0 within 0.7 of the mean size, a the mean size of the others (arXiv:1605.04711)
    1 bit                   -m, m: m the mean size (XNOR-Net, arXiv:1603.05279)

Rounding to nearest costs half a step at most, but up to one at the upper end, asymmetric 1.5. A row of zeros, or of
one number, stays as it is (DeepSpeed divides by zero). Stored so, a model of 16 bits a number takes bits / 16 of that,
and a scale a row. Nothing is stored so here, nor in DeepSpeed while it trains: the numbers are on the grid, the format
is as it was.
DeepSpeed until 0.19.6: deepspeed/compression/utils.py, deepspeed/runtime/quantize.py.
"""

from typing import Any

import torch
from torch import Tensor


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Tensor) -> Tensor:
        return there

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def straight_through(x: Tensor, there: Tensor) -> Tensor:
    """`there`, of x's shape; its gradient is x's."""
    result: Tensor = _StraightThrough.apply(x, there)  # type: ignore[no-untyped-call]
    return result


def on_grid(x: Tensor, bits: int, symmetric: bool = True, groups: int = 1, noise: Tensor | None = None) -> Tensor:
    """x of any shape, cut into `groups` rows of equal length -> the nearest levels, of its shape and dtype.

    `noise`, of x's shape, uniform in -1/2 .. 1/2, is added before numbers of 3 bits or more are rounded. ValueError if
    the rows would differ in length.
    """
    if not x.numel():  # an expert without tokens, say, and so without groups
        return x
    if x.numel() % groups:
        raise ValueError(f"{x.numel()} numbers cannot be cut into {groups} groups of equal length")
    with torch.no_grad():
        rows = in_full(x).reshape(groups, -1)
        there = _levels(rows, bits, symmetric, None if noise is None else noise.reshape(rows.shape))
    return straight_through(x, there.view(x.shape).to(x.dtype))


def in_range(x: Tensor, bits: int, symmetric: bool, low: Tensor, high: Tensor) -> Tensor:
    """x on the grid between `low` and `high`, scalars measured before; what lies outside moves to the ends."""
    with torch.no_grad():
        full, low, high = in_full(x), in_full(low), in_full(high)
        there = _even(full, bits, torch.maximum(low.abs(), high)) if symmetric else _between(full, bits, low, high)
        there = torch.where(low == high, full, there)  # no range: nothing has been seen
    return straight_through(x, there.to(x.dtype))


def in_full(x: Tensor) -> Tensor:
    """x, of 32 bits if it has fewer: fp16 holds neither the sum of a large row nor 65535, bf16 no 12 bits' levels."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _levels(rows: Tensor, bits: int, symmetric: bool, noise: Tensor | None) -> Tensor:
    """rows [groups, n] -> the same, rounded."""
    if bits == 1:
        return rows.sign() * _mean_size(rows)
    if bits == 2:
        return _ternary(rows)
    if symmetric:
        return _even(rows, bits, rows.abs().amax(1, keepdim=True), noise)
    return _between(rows, bits, rows.amin(1, keepdim=True), rows.amax(1, keepdim=True), noise)


def _even(x: Tensor, bits: int, largest: Tensor, noise: Tensor | None = None) -> Tensor:
    half = 1 << (bits - 1)
    step = torch.where(largest == 0, 1, largest / half)
    return _dithered(x / step, noise).round_().clamp_(-half, half - 1) * step


def _between(x: Tensor, bits: int, low: Tensor, high: Tensor, noise: Tensor | None = None) -> Tensor:
    span = high - low
    step = torch.where(span == 0, 1, span / (1 << bits))
    zero = (low / step).round() * step
    there = _dithered((x - zero) / step, noise).round_().clamp_(0, (1 << bits) - 1) * step + zero
    return torch.where(span == 0, x, there)


def _dithered(steps: Tensor, noise: Tensor | None) -> Tensor:
    return steps if noise is None else steps + noise


def _ternary(rows: Tensor) -> Tensor:
    large = rows.abs() > 0.7 * _mean_size(rows)
    mean = (rows * large).abs().sum(1, keepdim=True) / large.sum(1, keepdim=True).clamp(min=1)
    return rows.sign() * large * mean


def _mean_size(rows: Tensor) -> Tensor:
    sizes: Tensor = torch.linalg.vector_norm(rows, 1, 1, keepdim=True)
    return sizes / rows.shape[1]
