"""Dropout whose mask is never stored: backward draws it again from the seed.

Forward moves 2 n b bytes for n numbers of b bytes (read x, write y), backward as many. A stored mask would be n bytes
more to write, to keep and to read. The random numbers are Philox4x32-10's: number k of the sequence is a function of
the seed and of k alone, so that every program, and backward, finds its own. Ten rounds give four 32-bit numbers for
four elements, some 15 integer operations an element: with one element a draw, arithmetic would be the limit, not the
memory. The same seed gives the same mask on a CPU (by torch's integer operators, slowly) and on a GPU, whatever the
dtype. Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3". DeepSpeed's file:
csrc/transformer/dropout_kernels.cu.
"""

from typing import Any

import torch
from torch import Tensor

from refimpl.kernels.case import Case, short
from refimpl.kernels.checks import floating, number, whole
from refimpl.kernels.language import on, once_differentiable, takes, tl, triton

QUARTER = 1024  # draws of a program, each of which gives four elements: part of what a seed means, so never changed
WORD = 0xFFFFFFFF


def dropout(x: Tensor, p: float, seed: int, training: bool = True) -> Tensor:
    """x [...] -> x / (1 - p) where it is kept, 0 elsewhere; each element is dropped with probability p.

    Which ones is said by `seed` (0 to 2**63 - 1) and their place in x's row-major order. p is rounded to 2**-24. Any
    strides; x may be empty. Raises TypeError for a dtype that is no float, ValueError for p or seed out of range.
    """
    floating("dropout", x=x)
    number("dropout", 0, 1, p=p)
    whole("dropout", seed=seed)
    if not 0 <= seed < 1 << 63:
        raise ValueError(f"dropout: seed is {seed}; it must be between 0 and 2**63 - 1")
    if not training or p == 0:
        return x
    if p == 1:
        return x.masked_fill(torch.ones((), dtype=torch.bool, device=x.device), 0)
    with on(x):
        y: Tensor = Dropout.apply(x, p, seed)  # type: ignore[no-untyped-call]
        return y


def reference(x: Tensor, p: float, seed: int) -> Tensor:
    """The same by torch's operators."""
    return torch.where(mask(x.shape, p, seed, x.device), x, 0) / (1 - p)  # a product would keep inf as NaN


def mask(shape: torch.Size, p: float, seed: int, device: torch.device) -> Tensor:
    """Which elements of a tensor of this shape are kept: bool [...]."""
    count = shape.numel()
    programs = -(-count // (4 * QUARTER))
    draws = philox(seed, torch.arange(programs * QUARTER, device=device)).view(4, programs, QUARTER)
    kept = draws.transpose(0, 1).reshape(-1)[:count] >> 8 >= threshold(p)
    return kept.view(shape)


def threshold(p: float) -> int:
    return round(p * (1 << 24))


def philox(seed: int, counter: Tensor) -> Tensor:
    """counter [K] int64 -> [4, K] int64: the 32-bit words that Philox4x32-10 makes of (counter, 0, 0) and the seed."""
    words = [counter & WORD, counter >> 32, torch.zeros_like(counter), torch.zeros_like(counter)]
    keys = [seed & WORD, seed >> 32]
    for _ in range(10):
        (high_a, low_a), (high_b, low_b) = product(words[0], 0xD2511F53), product(words[2], 0xCD9E8D57)
        words = [high_b ^ words[1] ^ keys[0], low_b, high_a ^ words[3] ^ keys[1], low_a]
        keys = [keys[0] + 0x9E3779B9 & WORD, keys[1] + 0xBB67AE85 & WORD]
    return torch.stack(words)


def product(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """The high and the low word of a 64-bit product, by halves of 16 bits, as int64 has a sign."""
    low, high = x * (factor & 0xFFFF), x * (factor >> 16)  # below 2**48
    middle = (low >> 16) + high
    return middle >> 16, (middle & 0xFFFF) << 16 | (low & 0xFFFF)


@triton.jit
def quarter(x, y, at, words, size, least, scale):
    keep = (words >> 8).to(tl.int32) >= least
    value = tl.load(x + at, at < size, 0.0).to(tl.float32)
    tl.store(y + at, tl.where(keep, value * scale, 0.0).to(y.dtype.element_ty), at < size)


@triton.jit
def kernel(x, y, size: tl.int64, seed: tl.int64, least, scale, QUARTER: tl.constexpr):
    """A program draws QUARTER times; word w of draw d is for element (4 program + w) QUARTER + d."""
    lane = tl.arange(0, QUARTER)
    draw = tl.program_id(0).to(tl.int64) * QUARTER + lane
    zero = lane.to(tl.uint32) * 0
    a, b, c, d = tl.philox(seed, (draw & 0xFFFFFFFF).to(tl.uint32), (draw >> 32).to(tl.uint32), zero, zero)
    first = tl.program_id(0).to(tl.int64) * 4 * QUARTER + lane
    quarter(x, y, first, a, size, least, scale)
    quarter(x, y, first + QUARTER, b, size, least, scale)
    quarter(x, y, first + 2 * QUARTER, c, size, least, scale)
    quarter(x, y, first + 3 * QUARTER, d, size, least, scale)


def drop(x: Tensor, p: float, seed: int) -> Tensor:
    if x.numel() == 0 or not takes(x):
        return reference(x, p, seed)
    x = x.contiguous()
    y = torch.empty_like(x)
    kernel[(triton.cdiv(x.numel(), 4 * QUARTER),)](
        x, y, x.numel(), seed, threshold(p), 1 / (1 - p), QUARTER=QUARTER, num_warps=8
    )
    return y


class Dropout(torch.autograd.Function):
    """One operation of autograd, which keeps two numbers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, seed: int) -> Tensor:
        ctx.p, ctx.seed = p, seed
        return drop(x, p, seed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return drop(grad, ctx.p, ctx.seed), None, None


def _case(size: int, dtype: torch.dtype = torch.bfloat16) -> Case:
    def inputs(device: torch.device) -> tuple[Any, ...]:
        return torch.randn(size, device=device, dtype=dtype).requires_grad_(), 0.1, 1 << 40

    moved = 2 * dtype.itemsize * size
    return Case(f"dropout {short(dtype)} {size}", dropout, reference, inputs, moved, moved)


CASES = (_case(1 << 26),)
SMALL = (_case(1 << 20, torch.float32),)
