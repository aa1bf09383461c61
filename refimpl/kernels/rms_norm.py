"""RMSNorm: y = x / sqrt(mean(x**2) + eps) * weight, a row at a time; the row is read once.

Forward moves 2 M N b bytes for M rows of N elements of b bytes (read x, write y), N b for the weight, 4 M for 1/rms,
which is kept. Backward moves 3 M N b (read x and g, write dx). With h = x / rms and u = g * weight:
    dx = (u - h * mean(u * h)) / rms;    dweight = sum over rows of g * h
4 M N FLOPs forward and 9 M N backward, about one a byte: the memory is the limit. What public kernels lose in backward
is dweight: here each program walks over many rows, keeps its sum in registers, and loads the next rows while it reduces
these (`num_stages`: asynchronous copies into shared memory). The sums of all programs, 8 N a multiprocessor, are added
at the end, in a fixed order.
Zhang and Sennrich 2019, arXiv:1910.07467, section 4. DeepSpeed's file: csrc/transformer/inference/csrc/rms_norm.cu.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from refimpl.kernels.case import Case
from refimpl.kernels.checks import autocast, floating, last_dim, number, one_device, present, rows
from refimpl.kernels.language import on, once_differentiable, processors, shared_memory, takes, tl, triton
from refimpl.kernels.tiles import tile

LONGEST, LONGEST_BACKWARD = 16384, 8192  # elements of a row that stay in registers
PROGRAMS = 2  # of the backward kernel, on each multiprocessor


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """x [..., N], weight [N] or None -> [..., N] in x's dtype, computed in fp32. Any strides; x may be empty.

    Under autocast the result is fp32, as torch's on a GPU. Raises TypeError for a dtype that is no float, ValueError
    for sizes or devices that do not fit.
    """
    floating("rms_norm", x=x, **present(weight=weight))
    one_device("rms_norm", x=x, weight=weight)
    last_dim("rms_norm", x, weight=weight)
    number("rms_norm", 0, eps=eps)
    x, weight = autocast(x, weight, wide=True)
    if x.numel() == 0 or not takes(x, weight):
        return reference(x, weight, eps)
    with on(x):
        y: Tensor = RMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
        return y


def reference(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """The same by torch's operators."""
    if weight is None or weight.dtype == x.dtype:
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    return F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype)


@triton.jit
def forward_kernel(
    x, weight, y, rstd, rows, size, stride: tl.int64, stride_y: tl.int64, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, WEIGHT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # [R]; strides have 64 bits: so have products with them
    inside = row < rows
    if WHOLE:
        col = tl.arange(0, BLOCK)
        mask = inside[:, None] & (col < size)[None, :]
        h = tl.load(x + row[:, None] * stride + col[None, :], mask, 0.0).to(tl.float32)  # [R, BLOCK]
        scale = tl.rsqrt(tl.sum(h * h, 1) / size + eps)  # [R]
        h *= scale[:, None]
        if WEIGHT:
            h *= tl.load(weight + col, col < size, 0.0).to(tl.float32)[None, :]
        tl.store(y + row[:, None] * stride_y + col[None, :], h.to(y.dtype.element_ty), mask)
    else:
        total = tl.zeros([ROWS, BLOCK], tl.float32)
        for start in range(0, size, BLOCK):
            col = start + tl.arange(0, BLOCK)
            mask = inside[:, None] & (col < size)[None, :]
            h = tl.load(x + row[:, None] * stride + col[None, :], mask, 0.0).to(tl.float32)
            total += h * h
        scale = tl.rsqrt(tl.sum(total, 1) / size + eps)
        for start in range(0, size, BLOCK):  # the row again, from the second-level cache
            col = start + tl.arange(0, BLOCK)
            mask = inside[:, None] & (col < size)[None, :]
            h = tl.load(x + row[:, None] * stride + col[None, :], mask, 0.0).to(tl.float32) * scale[:, None]
            if WEIGHT:
                h *= tl.load(weight + col, col < size, 0.0).to(tl.float32)[None, :]
            tl.store(y + row[:, None] * stride_y + col[None, :], h.to(y.dtype.element_ty), mask)
    tl.store(rstd + row, scale, inside)


@triton.jit
def backward_kernel(
    x, weight, grad, rstd, dx, dweight, rows, size, stride: tl.int64, stride_grad: tl.int64, stride_dx: tl.int64,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WEIGHT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Rows that fit into registers. dweight [programs, size] fp32: one partial sum a program."""
    col = tl.arange(0, BLOCK)
    there = col < size
    if WEIGHT:
        w = tl.load(weight + col, there, 0.0).to(tl.float32)
        sums = tl.zeros([BLOCK], tl.float32)
    for turn in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = turn * ROWS + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & there[None, :]
        h = tl.load(x + row[:, None] * stride + col[None, :], mask, 0.0).to(tl.float32)
        g = tl.load(grad + row[:, None] * stride_grad + col[None, :], mask, 0.0).to(tl.float32)
        scale = tl.load(rstd + row, row < rows, 0.0)[:, None]
        h *= scale
        if WEIGHT:
            sums += tl.sum(g * h, 0)
            g *= w[None, :]
        mean = tl.sum(g * h, 1) / size
        d = (g - h * mean[:, None]) * scale
        tl.store(dx + row[:, None] * stride_dx + col[None, :], d.to(dx.dtype.element_ty), mask)
    if WEIGHT:
        tl.store(dweight + tl.program_id(0) * stride_dx + col, sums, there)


@triton.jit
def backward_long_kernel(
    x, weight, grad, rstd, dx, dweight, rows, size, stride: tl.int64, stride_grad: tl.int64, stride_dx: tl.int64,
    BLOCK: tl.constexpr, WEIGHT: tl.constexpr,
):  # fmt: skip
    """Longer rows: each is read twice, and the partial sums stay in memory (the second-level cache, mostly)."""
    if WEIGHT:
        mine = dweight + tl.program_id(0) * stride_dx  # zeros at first
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        at, at_grad = x + row * stride, grad + row * stride_grad
        scale = tl.load(rstd + row)
        total = tl.zeros([BLOCK], tl.float32)
        for start in range(0, size, BLOCK):
            col = start + tl.arange(0, BLOCK)
            h = tl.load(at + col, col < size, 0.0).to(tl.float32) * scale
            g = tl.load(at_grad + col, col < size, 0.0).to(tl.float32)
            if WEIGHT:
                g *= tl.load(weight + col, col < size, 0.0).to(tl.float32)
            total += g * h
        # For this sum the warps wait for each other: a partial sum may be loaded by another one than has stored it.
        mean = tl.sum(total, 0) / size
        for start in range(0, size, BLOCK):
            col = start + tl.arange(0, BLOCK)
            h = tl.load(at + col, col < size, 0.0).to(tl.float32) * scale
            g = tl.load(at_grad + col, col < size, 0.0).to(tl.float32)
            if WEIGHT:
                tl.store(mine + col, tl.load(mine + col, col < size, 0.0) + g * h, col < size)
                g *= tl.load(weight + col, col < size, 0.0).to(tl.float32)
            d = (g - h * mean) * scale
            tl.store(dx + row * stride_dx + col, d.to(dx.dtype.element_ty), col < size)


class RMSNorm(torch.autograd.Function):
    """The kernels as one operation of autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        flat, count = rows(x), x.numel() // x.shape[-1]  # [M, N]
        weight = weight if weight is None else weight.contiguous()
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        rstd = torch.empty(count, dtype=torch.float32, device=x.device)
        t = tile(flat.shape[1], LONGEST)
        forward_kernel[(triton.cdiv(count, t.rows),)](
            flat, weight, y, rstd, count, flat.shape[1], flat.stride(0), flat.shape[1], eps,
            ROWS=t.rows, BLOCK=t.block, WHOLE=t.whole, WEIGHT=weight is not None, num_warps=t.warps,
        )  # fmt: skip
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, rstd = ctx.saved_tensors
        flat, flat_grad = rows(x), rows(grad)
        count, size = flat.shape
        t = tile(size, LONGEST_BACKWARD)
        programs = min(triton.cdiv(count, t.rows), PROGRAMS * processors(x.device))
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        partial = None if weight is None else torch.empty(programs, size, dtype=torch.float32, device=x.device)
        strides = flat.stride(0), flat_grad.stride(0), size
        common = (flat, weight, flat_grad, rstd, dx, partial, count, size, *strides)
        if t.whole:
            tiles = 2 * t.rows * t.block * x.itemsize  # of x and of the gradient, where loads in flight arrive
            backward_kernel[(programs,)](
                *common, ROWS=t.rows, BLOCK=t.block, WEIGHT=weight is not None,
                STAGES=min(3, 1 + shared_memory(x.device) // tiles), num_warps=t.warps,
            )  # fmt: skip
        else:
            if partial is not None:
                partial.zero_()
            backward_long_kernel[(programs,)](*common, BLOCK=t.block, WEIGHT=weight is not None, num_warps=t.warps)
        return dx, None if partial is None else partial.sum(0).to(weight.dtype), None


def _case(name: str, dtype: torch.dtype, m: int, n: int) -> Case:
    def inputs(device: torch.device) -> tuple[Any, ...]:
        x, weight = (torch.randn(*shape, device=device, dtype=dtype) for shape in ((m, n), (n,)))
        return x.requires_grad_(), weight.requires_grad_(), 1e-6

    b = dtype.itemsize
    return Case(
        f"rms_norm {name} {m}x{n}", rms_norm, reference, inputs, 2 * m * n * b + n * b + 4 * m, 3 * m * n * b + 4 * m
    )


CASES = (
    _case("bf16", torch.bfloat16, 16384, 4096),
    _case("bf16", torch.bfloat16, 65536, 768),
    _case("fp32", torch.float32, 16384, 8192),
    _case("bf16", torch.bfloat16, 2048, 32768),
)
SMALL = (_case("fp32", torch.float32, 4096, 768),)
