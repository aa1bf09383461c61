"""Softmax of each row, exp(x - max) / sum: the row is read once, and written once.

Forward moves 2 M N b bytes for M rows of N elements of b bytes, backward 3 M N b (read y and g, write dx):
    dx = y * (g - sum(g * y))
4 M N FLOPs and M N exponentials forward, 4 M N backward: the memory is the limit. A row too long for the registers is
read twice: once for its maximum and its sum together, the sum being rescaled when the maximum grows.
Milakov and Gimelshein 2018, arXiv:1805.02867 (the online form). DeepSpeed's file: csrc/transformer/softmax_kernels.cu.
"""

from typing import Any

import torch
from torch import Tensor

from refimpl.kernels.case import Case
from refimpl.kernels.checks import autocast, floating, rows, whole
from refimpl.kernels.language import on, once_differentiable, takes, tl, triton
from refimpl.kernels.tiles import tile

LONGEST, LONGEST_BACKWARD = 16384, 8192  # elements of a row that stay in registers


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """x [..., N] -> the same shape and dtype (under autocast fp32), computed in fp32; a slice along `dim` adds up to 1.

    Any strides; x may be empty, or one number, whose softmax is 1. A slice of -inf alone gives NaN, as torch's does.
    Raises TypeError for a dtype that is no float, IndexError for a dimension that x has not.
    """
    floating("softmax", x=x)
    whole("softmax", dim=dim)
    if not -max(x.dim(), 1) <= dim < max(x.dim(), 1):
        raise IndexError(f"softmax: dim is {dim}, but x has {x.dim()} dimensions")
    (x,) = autocast(x, wide=True)
    if x.numel() == 0 or x.dim() == 0 or not takes(x):
        return torch.softmax(x, dim)
    with on(x):
        y: Tensor = Softmax.apply(x.movedim(dim, -1))  # type: ignore[no-untyped-call]
        return y.movedim(-1, dim)


def reference(x: Tensor, dim: int = -1) -> Tensor:
    """The same by torch's operator."""
    return torch.softmax(x, dim)


@triton.jit
def forward_kernel(
    x, y, rows, size, stride: tl.int64, stride_y: tl.int64,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = (row < rows)[:, None]
    at, at_y = x + row[:, None] * stride, y + row[:, None] * stride_y
    if WHOLE:
        col = tl.arange(0, BLOCK)[None, :]
        mask = inside & (col < size)
        e = tl.load(at + col, mask, 0.0).to(tl.float32)  # [R, BLOCK]
        e = tl.where(inside & (col >= size), float("-inf"), e)  # but 0 in rows that are none: -inf minus -inf is NaN
        e = tl.exp(e - tl.max(e, 1)[:, None])
        tl.store(at_y + col, (e / tl.sum(e, 1)[:, None]).to(y.dtype.element_ty), mask)
    else:
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        for start in range(0, size, BLOCK):
            col = start + tl.arange(0, BLOCK)[None, :]
            e = tl.load(at + col, inside & (col < size), float("-inf")).to(tl.float32)  # [R, BLOCK]
            higher = tl.maximum(top, tl.max(e, 1))
            finite = tl.where(higher == float("-inf"), 0.0, higher)  # -inf minus -inf would be NaN
            total = total * tl.exp(top - finite) + tl.sum(tl.exp(e - finite[:, None]), 1)
            top = higher
        for start in range(0, size, BLOCK):
            col = start + tl.arange(0, BLOCK)[None, :]
            mask = inside & (col < size)
            e = tl.exp(tl.load(at + col, mask, float("-inf")).to(tl.float32) - tl.where(inside, top[:, None], 0.0))
            tl.store(at_y + col, (e / tl.where(inside, total[:, None], 1.0)).to(y.dtype.element_ty), mask)


@triton.jit
def backward_kernel(
    y, grad, dx, rows, size, stride: tl.int64, stride_grad: tl.int64, stride_dx: tl.int64,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = (row < rows)[:, None]
    at, at_grad, at_dx = (
        y + row[:, None] * stride,
        grad + row[:, None] * stride_grad,
        dx + row[:, None] * stride_dx,
    )
    if WHOLE:
        col = tl.arange(0, BLOCK)[None, :]
        mask = inside & (col < size)
        p = tl.load(at + col, mask, 0.0).to(tl.float32)
        g = tl.load(at_grad + col, mask, 0.0).to(tl.float32)
        tl.store(at_dx + col, (p * (g - tl.sum(p * g, 1)[:, None])).to(dx.dtype.element_ty), mask)
    else:
        total = tl.zeros([ROWS, BLOCK], tl.float32)
        for start in range(0, size, BLOCK):
            col = start + tl.arange(0, BLOCK)[None, :]
            mask = inside & (col < size)
            total += tl.load(at + col, mask, 0.0).to(tl.float32) * tl.load(at_grad + col, mask, 0.0).to(tl.float32)
        inner = tl.sum(total, 1)[:, None]
        for start in range(0, size, BLOCK):
            col = start + tl.arange(0, BLOCK)[None, :]
            mask = inside & (col < size)
            g = tl.load(at_grad + col, mask, 0.0).to(tl.float32)
            d = tl.load(at + col, mask, 0.0).to(tl.float32) * (g - inner)
            tl.store(at_dx + col, d.to(dx.dtype.element_ty), mask)


class Softmax(torch.autograd.Function):
    """The kernels as one operation of autograd, along the last dimension."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        flat = rows(x)  # [M, N]
        count, size = flat.shape
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        t = tile(size, LONGEST)
        forward_kernel[(triton.cdiv(count, t.rows),)](
            flat, y, count, size, flat.stride(0), size, ROWS=t.rows, BLOCK=t.block, WHOLE=t.whole, num_warps=t.warps
        )
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        flat, flat_grad = rows(y), rows(grad)
        count, size = flat.shape
        dx = torch.empty(y.shape, dtype=y.dtype, device=y.device)
        t = tile(size, LONGEST_BACKWARD)
        backward_kernel[(triton.cdiv(count, t.rows),)](
            flat, flat_grad, dx, count, size, flat.stride(0), flat_grad.stride(0), size,
            ROWS=t.rows, BLOCK=t.block, WHOLE=t.whole, num_warps=t.warps,
        )  # fmt: skip
        return dx


def _case(name: str, dtype: torch.dtype, m: int, n: int) -> Case:
    def inputs(device: torch.device) -> tuple[Any, ...]:
        return (torch.randn(m, n, device=device, dtype=dtype).requires_grad_(),)

    moved = m * n * dtype.itemsize
    return Case(f"softmax {name} {m}x{n}", softmax, reference, inputs, 2 * moved, 3 * moved)


CASES = (_case("bf16", torch.bfloat16, 32768, 2048), _case("bf16", torch.bfloat16, 2048, 50257))
SMALL = (_case("fp32", torch.float32, 4096, 1024),)
