"""Grouped matmul: rows sorted by group, each group times a matrix of its own, in one launch and without padding rows.

    y[r] = x[r] @ w[group of r]           x [M, K], w [G, K, N], counts [G] -> y [M, N]

2 M K N FLOPs, 4 M K N backward. Bytes, for elements of b: each of x, y once and w once at best, (M K + M N + G K N) b;
tile by tile x is loaded N / BLOCK_N times and w M / BLOCK_M times, mostly out of the L2 cache, because neighbouring
programs work on 8 tiles of rows by all tiles of columns. The limit is the matrix unit once a group has some hundred
rows; below that it is reading w.

How many tiles a group has is known on the device alone. The grid is the most that there can be, M / BLOCK_M + G, and a
program finds its group in the tiles' running sum: no wait for the device. An empty group has no tile, rows after the
last group are zeros. Backward: dx is the same kernel on w transposed; dw has one program for each tile of each matrix,
which walks over its group's rows in order, so a gradient is the same bits every time, and zeros for an empty group.
torch: F.grouped_mm (bf16, CUTLASS). MegaBlocks: arXiv:2211.15841. DeepSpeed: deepspeed/moe/ep_experts.py.
Not run on a GPU by its authors.
"""

from typing import Any

import torch
from torch import Tensor

from refimpl.kernels.case import Case, short
from refimpl.kernels.checks import autocast, floating, integer, one_device
from refimpl.kernels.dots import dots
from refimpl.kernels.language import on, once_differentiable, takes, tl, triton

WIDEST = 4096  # groups


def grouped_matmul(x: Tensor, w: Tensor, counts: Tensor) -> Tensor:
    """x [M, K], w [G, K, N], counts int [G]: the rows of each group, in order -> [M, N] in x's dtype.

    Any strides: w may be a transposed [G, N, K]. Rows after the last group give zeros. ValueError for sizes that do not
    fit, and on a CPU for counts below 0 or beyond M; on a GPU, where looking would wait, rows beyond M are left out.
    """
    floating("grouped_matmul", x=x, w=w)
    integer("grouped_matmul", counts=counts)
    one_device("grouped_matmul", x=x, w=w, counts=counts)
    x, w = autocast(x, w)
    if x.dtype != w.dtype:
        raise TypeError(f"grouped_matmul: x is {x.dtype}, w {w.dtype}; one dtype is needed")
    if x.ndim != 2 or w.ndim != 3 or counts.shape != w.shape[:1] or x.shape[1] != w.shape[1] or len(w) > WIDEST:
        found = f"x {list(x.shape)}, w {list(w.shape)}, counts {list(counts.shape)}"
        raise ValueError(f"grouped_matmul: {found}; [M, K], [G, K, N] and [G] are needed, G at most {WIDEST}")
    if counts.is_cpu and (bool((counts < 0).any()) or int(counts.sum()) > len(x)):
        raise ValueError(f"grouped_matmul: counts {counts.tolist()} for {len(x)} rows")
    if min(x.numel(), w.numel()) == 0 or not takes(x, w, counts):
        return reference(x, w, counts)
    with on(x):
        y: Tensor = GroupedMatmul.apply(x, w, counts)  # type: ignore[no-untyped-call]
    return y


def reference(x: Tensor, w: Tensor, counts: Tensor) -> Tensor:
    """A matrix product of torch's for each group."""
    sizes = counts.tolist()
    groups = x.split([*sizes, len(x) - sum(sizes)])  # type: ignore[no-untyped-call]
    made = [rows @ w[group] for group, rows in enumerate(groups[:-1])]
    rest = groups[-1].sum(1, keepdim=True).masked_fill(torch.ones((), dtype=torch.bool, device=x.device), 0)
    return torch.cat([*made, rest.expand(-1, w.shape[2])])


@triton.jit
def grouped_kernel(
    x, w, y, ends, tile_ends, total, depth, width, groups, row_tiles,
    x_row: tl.int64, x_col, w_group: tl.int64, w_row, w_col,
    BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y [total, width] contiguous. ends [G]: where groups end; tile_ends [G]: tiles of rows up to there."""
    columns = tl.cdiv(width, BLOCK_N)
    program = tl.program_id(0)
    band = program // (8 * columns)  # 8 tiles of rows by all columns
    tall = tl.minimum(row_tiles - band * 8, 8)
    row_tile = band * 8 + program % (8 * columns) % tall
    column = program % (8 * columns) // tall
    number = tl.arange(0, BLOCK_G)
    ended = tl.load(tile_ends + number, mask=number < groups, other=2147483647)
    group = tl.sum((ended <= row_tile).to(tl.int32), 0)
    begin = 0
    first_tile = 0
    if group > 0:
        begin = tl.load(ends + group - 1)
        first_tile = tl.load(tile_ends + group - 1)
    end = total
    if group < groups:
        end = tl.load(ends + group)
    start = begin + (row_tile - first_tile) * BLOCK_M
    row = start + tl.arange(0, BLOCK_M)
    col = column * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    safe_row = tl.where(row < end, row, 0).to(tl.int64)  # rows outside read row 0, and what that gives is not stored
    safe_group = tl.minimum(group, groups - 1).to(tl.int64)
    a_at = x + safe_row[:, None] * x_row + k[None, :] * x_col
    b_at = w + safe_group * w_group + k[:, None] * w_row + col.to(tl.int64)[None, :] * w_col
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start_k in range(0, tl.where(group < groups, depth, 0), BLOCK_K):
        if EVEN:
            a = tl.load(a_at)
            b = tl.load(b_at)
        else:
            there = start_k + k < depth
            a = tl.load(a_at, mask=there[None, :], other=0.0)
            b = tl.load(b_at, mask=there[:, None] & (col < width)[None, :], other=0.0)
        sums = tl.dot(a.to(DOT), b.to(DOT), sums, input_precision=PRECISION)
        a_at += BLOCK_K * x_col
        b_at += BLOCK_K * w_row
    mask = (row < end)[:, None] & (col < width)[None, :]
    tl.store(y + row.to(tl.int64)[:, None] * width + col[None, :], sums.to(y.dtype.element_ty), mask=mask)


@triton.jit
def grouped_weights_kernel(
    x, g, dw, ends, depth, width,
    x_row: tl.int64, x_col, g_row: tl.int64, g_col,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dw [G, depth, width] contiguous: x^T g over the rows of each group."""
    columns = tl.cdiv(width, BLOCK_N)
    tiles = tl.cdiv(depth, BLOCK_K) * columns
    group = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    begin = 0
    if group > 0:
        begin = tl.load(ends + group - 1)
    end = tl.load(ends + group)
    k = tile // columns * BLOCK_K + tl.arange(0, BLOCK_K)
    col = tile % columns * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    sums = tl.zeros([BLOCK_K, BLOCK_N], tl.float32)
    x_at = x + tl.cast(begin, tl.int64) * x_row + m[None, :] * x_row + k.to(tl.int64)[:, None] * x_col  # transposed
    g_at = g + tl.cast(begin, tl.int64) * g_row + m[:, None] * g_row + col[None, :] * g_col
    for start in range(begin, end, BLOCK_M):
        there = start + m < end
        if EVEN:
            a = tl.load(x_at, mask=there[None, :], other=0.0)
            b = tl.load(g_at, mask=there[:, None], other=0.0)
        else:
            a = tl.load(x_at, mask=there[None, :] & (k < depth)[:, None], other=0.0)
            b = tl.load(g_at, mask=there[:, None] & (col < width)[None, :], other=0.0)
        sums = tl.dot(a.to(DOT), b.to(DOT), sums, input_precision=PRECISION)
        x_at += BLOCK_M * x_row
        g_at += BLOCK_M * g_row
    mask = (k < depth)[:, None] & (col < width)[None, :]
    place = group.to(tl.int64) * depth * width + k.to(tl.int64)[:, None] * width + col[None, :]
    tl.store(dw + place, sums.to(dw.dtype.element_ty), mask=mask)


def small(x: Tensor, depth: int, width: int) -> bool:
    """Whether tiles must be: exact fp32 fills registers, and so do the places of elements loaded one by one."""
    return x.dtype == torch.float32 or depth % 16 > 0 or width % 16 > 0


def multiply(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """x [M, K], w [G, K, N], ends int32 [G] -> [M, N]."""
    (total, depth), (groups, _, width) = x.shape, w.shape
    rows, columns, deep, warps, stages = (64, 64, 32, 4, 2) if small(x, depth, width) else (128, 256, 64, 8, 3)
    tile_ends = torch.diff(ends, prepend=ends.new_zeros(1)).add(rows - 1).div(rows, rounding_mode="floor")
    tile_ends = tile_ends.cumsum(0, dtype=torch.int32)
    even = depth % deep == 0 == width % columns
    row_tiles = (total + (groups + 1) * (rows - 1)) // rows  # of any counts, the rows after the last group among them
    y = x.new_empty(total, width)
    grouped_kernel[(row_tiles * triton.cdiv(width, columns),)](
        x, w, y, ends, tile_ends, total, depth, width, groups, row_tiles,
        x.stride(0), x.stride(1), w.stride(0), w.stride(1), w.stride(2),
        BLOCK_G=triton.next_power_of_2(groups), BLOCK_M=rows, BLOCK_N=columns, BLOCK_K=deep, EVEN=even,
        num_warps=warps, num_stages=stages, **dots(x.dtype),
    )  # fmt: skip
    return y


def multiply_weights(x: Tensor, g: Tensor, ends: Tensor) -> Tensor:
    """x [M, K], g [M, N] -> [G, K, N]."""
    groups, depth, width = len(ends), x.shape[1], g.shape[1]
    rows, columns, deep, warps, stages = (32, 64, 64, 4, 2) if small(x, depth, width) else (64, 256, 128, 8, 3)
    dw = x.new_empty(groups, depth, width)
    grouped_weights_kernel[(groups * triton.cdiv(depth, deep) * triton.cdiv(width, columns),)](
        x, g, dw, ends, depth, width, x.stride(0), x.stride(1), g.stride(0), g.stride(1),
        BLOCK_M=rows, BLOCK_N=columns, BLOCK_K=deep,
        EVEN=depth % deep == 0 == width % columns, num_warps=warps, num_stages=stages, **dots(x.dtype),
    )  # fmt: skip
    return dw


class GroupedMatmul(torch.autograd.Function):
    """The kernels as one operation of autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, counts: Tensor) -> Tensor:
        ends = counts.cumsum(0, dtype=torch.int32).clamp(max=len(x))
        ctx.save_for_backward(x, w, ends)
        return multiply(x, w, ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, w, ends = ctx.saved_tensors
        g = g.contiguous()
        dx = multiply(g, w.transpose(1, 2), ends) if ctx.needs_input_grad[0] else None
        return dx, multiply_weights(x, g, ends) if ctx.needs_input_grad[1] else None, None


def _case(dtype: torch.dtype, counts: tuple[int, ...], depth: int, width: int) -> Case:
    total, groups, e = sum(counts), len(counts), dtype.itemsize

    def inputs(device: torch.device) -> tuple[Any, ...]:
        x = torch.randn(total, depth, device=device, dtype=dtype, requires_grad=True)
        w = torch.randn(groups, depth, width, device=device, dtype=dtype).mul(depth**-0.5).requires_grad_()
        return x, w, torch.tensor(counts, dtype=torch.int32).to(device)

    def grouped_mm(x: Tensor, w: Tensor, counts: Tensor) -> Tensor:
        return torch.nn.functional.grouped_mm(x, w, offs=counts.cumsum(0, dtype=torch.int32))

    moved = (total * (depth + width) + groups * depth * width) * e
    flops = 2 * total * depth * width
    return Case(
        f"grouped_matmul {short(dtype)} {total}x{depth}x{width} in {groups}", grouped_matmul, reference, inputs, moved,
        moved_backward=2 * moved, flops=flops, flops_backward=2 * flops, peers={"F.grouped_mm": grouped_mm},
    )  # fmt: skip


CASES = (
    _case(torch.bfloat16, (4000, 96, 0, 8100, 2000, 3000, 8, 15564), 4096, 2048),
    _case(torch.bfloat16, (500, 0, 300, 12), 1001, 500),
)
SMALL = (_case(torch.float32, (300, 0, 200, 12), 256, 384),)
