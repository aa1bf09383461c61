"""LayerNorm: y = (x - mean) / sqrt(var + eps) * weight + bias, a row at a time; the row is read once.

Forward moves 2 M N b bytes for M rows of N elements of b bytes (read x, write y), 2 N b for weight and bias, 8 M for
the mean and 1/std, which are kept. Backward moves 3 M N b (read x and g, write dx). With h = (x - mean) / std, u = g
weight:
    dx = (u - mean(u) - h * mean(u * h)) / std;    dweight = sum of g * h;    dbias = sum of g
7 M N FLOPs forward and 12 M N backward, about two a byte: the memory is the limit. The variance is taken of what the
mean was subtracted from: the difference of two large sums would lose it. Backward walks as RMSNorm's does
(rms_norm.py). Ba, Kiros and Hinton 2016, arXiv:1607.06450, section 3. DeepSpeed's file:
csrc/transformer/normalize_kernels.cu.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from refimpl.kernels.case import Case
from refimpl.kernels.checks import autocast, floating, last_dim, number, one_device, present, rows
from refimpl.kernels.language import on, once_differentiable, processors, takes, tl, triton
from refimpl.kernels.tiles import tile

LONGEST, LONGEST_BACKWARD = 16384, 4096  # elements of a row that stay in registers
PROGRAMS = 2  # of the backward kernel, on each multiprocessor


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """x [..., N], weight and bias [N] or None -> [..., N] in x's dtype, computed in fp32. Any strides; x may be empty.

    Under autocast the result is fp32, as torch's on a GPU. Raises TypeError for a dtype that is no float, ValueError
    for sizes or devices that do not fit.
    """
    floating("layer_norm", x=x, **present(weight=weight, bias=bias))
    one_device("layer_norm", x=x, weight=weight, bias=bias)
    last_dim("layer_norm", x, weight=weight, bias=bias)
    number("layer_norm", 0, eps=eps)
    x, weight, bias = autocast(x, weight, bias, wide=True)
    if x.numel() == 0 or not takes(x, weight, bias):
        return reference(x, weight, bias, eps)
    with on(x):
        y: Tensor = LayerNorm.apply(x, weight, bias, eps)  # type: ignore[no-untyped-call]
        return y


def reference(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """The same by torch's operators."""
    if all(t is None or t.dtype == x.dtype for t in (weight, bias)):
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    weight, bias = (None if t is None else t.float() for t in (weight, bias))
    return F.layer_norm(x.float(), x.shape[-1:], weight, bias, eps).to(x.dtype)


@triton.jit
def affine(h, weight, bias, col, size, WEIGHT: tl.constexpr, BIAS: tl.constexpr):
    if WEIGHT:
        h *= tl.load(weight + col, col < size, 0.0).to(tl.float32)[None, :]
    if BIAS:
        h += tl.load(bias + col, col < size, 0.0).to(tl.float32)[None, :]
    return h


@triton.jit
def forward_kernel(
    x, weight, bias, y, mean, rstd, rows, size, stride: tl.int64, stride_y: tl.int64, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # [R]; strides have 64 bits: so have products with them
    inside = row < rows
    at, at_y = x + row[:, None] * stride, y + row[:, None] * stride_y
    if WHOLE:
        col = tl.arange(0, BLOCK)
        mask = inside[:, None] & (col < size)[None, :]
        h = tl.load(at + col[None, :], mask, 0.0).to(tl.float32)  # [R, BLOCK]
        center = tl.sum(h, 1) / size
        h = tl.where(mask, h - center[:, None], 0.0)
        scale = tl.rsqrt(tl.sum(h * h, 1) / size + eps)
        h = affine(h * scale[:, None], weight, bias, col, size, WEIGHT, BIAS)
        tl.store(at_y + col[None, :], h.to(y.dtype.element_ty), mask)
    else:
        total = tl.zeros([ROWS, BLOCK], tl.float32)
        for start in range(0, size, BLOCK):
            col = start + tl.arange(0, BLOCK)
            total += tl.load(at + col[None, :], inside[:, None] & (col < size)[None, :], 0.0).to(tl.float32)
        center = tl.sum(total, 1) / size
        total = tl.zeros([ROWS, BLOCK], tl.float32)
        for start in range(0, size, BLOCK):  # the row again, from the second-level cache
            col = start + tl.arange(0, BLOCK)
            mask = inside[:, None] & (col < size)[None, :]
            h = tl.where(mask, tl.load(at + col[None, :], mask, 0.0).to(tl.float32) - center[:, None], 0.0)
            total += h * h
        scale = tl.rsqrt(tl.sum(total, 1) / size + eps)
        for start in range(0, size, BLOCK):
            col = start + tl.arange(0, BLOCK)
            mask = inside[:, None] & (col < size)[None, :]
            h = (tl.load(at + col[None, :], mask, 0.0).to(tl.float32) - center[:, None]) * scale[:, None]
            h = affine(h, weight, bias, col, size, WEIGHT, BIAS)
            tl.store(at_y + col[None, :], h.to(y.dtype.element_ty), mask)
    tl.store(mean + row, center, inside)
    tl.store(rstd + row, scale, inside)


@triton.jit
def backward_kernel(
    x, weight, grad, mean, rstd, dx, dweight, dbias, rows, size,
    stride: tl.int64, stride_grad: tl.int64, stride_dx: tl.int64,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Rows that fit into registers. dweight and dbias [programs, size] fp32: one partial sum a program."""
    col = tl.arange(0, BLOCK)
    there = col < size
    if WEIGHT:
        w = tl.load(weight + col, there, 0.0).to(tl.float32)
        sums = tl.zeros([BLOCK], tl.float32)
    if BIAS:
        plain = tl.zeros([BLOCK], tl.float32)
    for turn in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = turn * ROWS + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & there[None, :]
        h = tl.load(x + row[:, None] * stride + col[None, :], mask, 0.0).to(tl.float32)
        g = tl.load(grad + row[:, None] * stride_grad + col[None, :], mask, 0.0).to(tl.float32)
        center = tl.load(mean + row, row < rows, 0.0)[:, None]
        scale = tl.load(rstd + row, row < rows, 0.0)[:, None]
        h = tl.where(mask, (h - center) * scale, 0.0)
        if BIAS:
            plain += tl.sum(g, 0)
        if WEIGHT:
            sums += tl.sum(g * h, 0)
            g *= w[None, :]
        d = (g - tl.sum(g, 1)[:, None] / size - h * (tl.sum(g * h, 1) / size)[:, None]) * scale
        tl.store(dx + row[:, None] * stride_dx + col[None, :], d.to(dx.dtype.element_ty), mask)
    if WEIGHT:
        tl.store(dweight + tl.program_id(0) * stride_dx + col, sums, there)
    if BIAS:
        tl.store(dbias + tl.program_id(0) * stride_dx + col, plain, there)


@triton.jit
def backward_long_kernel(
    x, weight, grad, mean, rstd, dx, dweight, dbias, rows, size,
    stride: tl.int64, stride_grad: tl.int64, stride_dx: tl.int64,
    BLOCK: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Longer rows: each is read twice, and the partial sums stay in memory (the second-level cache, mostly)."""
    mine = tl.program_id(0) * stride_dx
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        at, at_grad = x + row * stride, grad + row * stride_grad
        center, scale = tl.load(mean + row), tl.load(rstd + row)
        total, product = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
        for start in range(0, size, BLOCK):
            col = start + tl.arange(0, BLOCK)
            h = (tl.load(at + col, col < size, 0.0).to(tl.float32) - center) * scale
            g = tl.load(at_grad + col, col < size, 0.0).to(tl.float32)
            if WEIGHT:
                g *= tl.load(weight + col, col < size, 0.0).to(tl.float32)
            total += g
            product += g * h
        # For these sums the warps wait for each other: a partial sum may be loaded by another one than has stored it.
        mean_g, mean_gh = tl.sum(total, 0) / size, tl.sum(product, 0) / size
        for start in range(0, size, BLOCK):
            col = start + tl.arange(0, BLOCK)
            there = col < size
            h = (tl.load(at + col, there, 0.0).to(tl.float32) - center) * scale
            g = tl.load(at_grad + col, there, 0.0).to(tl.float32)
            if BIAS:
                tl.store(dbias + mine + col, tl.load(dbias + mine + col, there, 0.0) + g, there)
            if WEIGHT:
                tl.store(dweight + mine + col, tl.load(dweight + mine + col, there, 0.0) + g * h, there)
                g *= tl.load(weight + col, there, 0.0).to(tl.float32)
            d = (g - mean_g - h * mean_gh) * scale
            tl.store(dx + row * stride_dx + col, d.to(dx.dtype.element_ty), there)


class LayerNorm(torch.autograd.Function):
    """The kernels as one operation of autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        flat = rows(x)  # [M, N]
        count, size = flat.shape
        weight, bias = (t if t is None else t.contiguous() for t in (weight, bias))
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        mean, rstd = torch.empty(2, count, dtype=torch.float32, device=x.device).unbind()
        t = tile(size, LONGEST)
        forward_kernel[(triton.cdiv(count, t.rows),)](
            flat, weight, bias, y, mean, rstd, count, size, flat.stride(0), size, eps, ROWS=t.rows, BLOCK=t.block,
            WHOLE=t.whole, WEIGHT=weight is not None, BIAS=bias is not None, num_warps=t.warps,
        )  # fmt: skip
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        x, weight, mean, rstd = ctx.saved_tensors
        flat, flat_grad = rows(x), rows(grad)
        count, size = flat.shape
        t = tile(size, LONGEST_BACKWARD)
        programs = min(triton.cdiv(count, t.rows), PROGRAMS * processors(x.device))
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        partial = torch.zeros if not t.whole else torch.empty
        dtypes = (None if weight is None else weight.dtype, ctx.bias_dtype)
        sums = [d and partial(programs, size, dtype=torch.float32, device=x.device) for d in dtypes]
        strides = flat.stride(0), flat_grad.stride(0), size
        common = (flat, weight, flat_grad, mean, rstd, dx, *sums, count, size, *strides)
        affine = {"WEIGHT": weight is not None, "BIAS": ctx.bias_dtype is not None}
        if t.whole:
            backward_kernel[(programs,)](*common, ROWS=t.rows, BLOCK=t.block, STAGES=3, num_warps=t.warps, **affine)
        else:
            backward_long_kernel[(programs,)](*common, BLOCK=t.block, num_warps=t.warps, **affine)
        dweight, dbias = (s if s is None else s.sum(0).to(d) for s, d in zip(sums, dtypes, strict=True))
        return dx, dweight, dbias, None


def _case(name: str, dtype: torch.dtype, m: int, n: int) -> Case:
    def inputs(device: torch.device) -> tuple[Any, ...]:
        shapes = ((m, n), (n,), (n,))
        return tuple(torch.randn(*shape, device=device, dtype=dtype).requires_grad_() for shape in shapes)

    b = dtype.itemsize
    forward, backward = 2 * m * n * b + 2 * n * b + 8 * m, 3 * m * n * b + 8 * m
    return Case(f"layer_norm {name} {m}x{n}", layer_norm, reference, inputs, forward, backward)


CASES = (
    _case("bf16", torch.bfloat16, 16384, 4096),
    _case("bf16", torch.bfloat16, 65536, 768),
    _case("fp32", torch.float32, 2048, 20480),
)
SMALL = (_case("fp32", torch.float32, 4096, 768),)
