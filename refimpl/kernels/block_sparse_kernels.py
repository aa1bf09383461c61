"""The kernels of block-sparse attention: those of flash attention, walking along lists of blocks.

A program has a tile of queries (or of keys, in the keys' kernel) and goes through the list of the block that the tile
is in. Blocks of 128 are walked in two halves, and rows with long lists start first. With `causal` the block on the
diagonal is the last of a row's list, or the first of a column's; it alone is masked.
"""

import torch
from torch import Tensor

from refimpl.kernels.attention_tiles import attend, give_keys, give_queries, heads_of, read_rows, store_rows
from refimpl.kernels.block_lists import BlockLists
from refimpl.kernels.flash_backward import flash_delta
from refimpl.kernels.flash_shapes import Shapes, roomy
from refimpl.kernels.language import tl, triton


@triton.jit
def list_of(starts, blocks, line, block_diagonal, LAST: tl.constexpr, CAUSAL: tl.constexpr):
    """-> where this line's list begins and ends, and whether its last (or first) block is on the diagonal."""
    begin = tl.load(starts + line)
    end = tl.load(starts + line + 1)
    on_diagonal = 0
    if CAUSAL and begin < end:
        if LAST:
            on_diagonal = (tl.load(blocks + end - 1) == block_diagonal).to(tl.int32)
        else:
            on_diagonal = (tl.load(blocks + begin) == block_diagonal).to(tl.int32)
    return begin, end, on_diagonal


@triton.jit
def sparse_forward_kernel(
    q, k, v, out, lse, starts, blocks, order, queries, keys, total_queries,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    heads, group, layout_heads, scale,
    CAUSAL: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """out [tokens, heads, D], lse [heads, tokens] in powers of 2; q, k, v by their strides."""
    tiles = queries // BLOCK_M
    rows = queries // BLOCK
    program = tl.program_id(0)
    batch = (program // tiles // heads).to(tl.int64)
    head = program // tiles % heads
    line = head % layout_heads * rows
    row = tl.load(order + line + program % tiles // (BLOCK // BLOCK_M))
    first = row * BLOCK + program % tiles % (BLOCK // BLOCK_M) * BLOCK_M
    shift = keys - queries
    begin, end, diagonal = list_of(starts, blocks, line + row, row + shift // BLOCK, True, CAUSAL)
    head_k = head // group
    q_heads = heads_of(q + batch * q_batch, heads, queries, q_head, q_row, BLOCK_M, D, BLOCK_D, TMA)
    k_heads = heads_of(k + batch * k_batch, heads // group, keys, k_head, k_row, BLOCK_N, D, BLOCK_D, TMA)
    v_heads = heads_of(v + batch * v_batch, heads // group, keys, v_head, v_row, BLOCK_N, D, BLOCK_D, TMA)
    query = first + tl.arange(0, BLOCK_M)
    q_tile = read_rows(q_heads, head, first, queries, q_head, q_row, BLOCK_M, D, BLOCK_D, False, TMA).to(DOT)
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    norm = tl.zeros([BLOCK_M], tl.float32)
    PARTS: tl.constexpr = BLOCK // BLOCK_N
    for index in range(begin * PARTS, (end - diagonal) * PARTS):
        start = tl.load(blocks + index // PARTS) * BLOCK + index % PARTS * BLOCK_N
        total, largest, norm = attend(
            total, largest, norm, q_tile, k_heads, v_heads, head_k, k_head, v_head, k_row, v_row, query, start, keys,
            shift, -1, 0, scale, False, CAUSAL, False, BLOCK_N, D, BLOCK_D, DOT, PRECISION, TMA,
        )  # fmt: skip
    if CAUSAL:
        for part in range(diagonal * PARTS):
            start = row * BLOCK + shift + part * BLOCK_N
            total, largest, norm = attend(
                total, largest, norm, q_tile, k_heads, v_heads, head_k, k_head, v_head, k_row, v_row, query, start,
                keys, shift, -1, 0, scale, False, CAUSAL, True, BLOCK_N, D, BLOCK_D, DOT, PRECISION, TMA,
            )  # fmt: skip
    nothing = norm == 0
    norm = tl.where(nothing, 1.0, norm)
    total = total / norm[:, None]
    lse_row = tl.where(nothing, float("inf"), largest + tl.log2(norm))
    token = batch * queries
    store_rows(out + (token * heads + head) * D, first, queries, heads * D, total, BLOCK_M, D, BLOCK_D)
    tl.store(lse + head.to(tl.int64) * total_queries + token + query, lse_row)


@triton.jit
def sparse_keys_kernel(
    q, k, v, g, dk, dv, lse, delta, starts, blocks, order, queries, keys, total_queries,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    heads, group, layout_heads, scale, gradient_scale,
    CAUSAL: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """dk, dv [tokens, heads // group, D]; g [tokens, heads, D]; q, k, v by their strides."""
    tiles = keys // BLOCK_N
    columns = keys // BLOCK
    program = tl.program_id(0)
    batch = (program // tiles // (heads // group)).to(tl.int64)
    head_k = program // tiles % (heads // group)
    # The heads of a group may have lists of their own; the order is the first one's.
    place = program % tiles // (BLOCK // BLOCK_N)
    column = tl.load(order + head_k * group % layout_heads * columns + place)
    first = column * BLOCK + program % tiles % (BLOCK // BLOCK_N) * BLOCK_N
    shift = keys - queries
    q_heads = heads_of(q + batch * q_batch, heads, queries, q_head, q_row, BLOCK_M, D, BLOCK_D, TMA)
    g_heads = heads_of(g + batch * queries * heads * D, heads, queries, D, heads * D, BLOCK_M, D, BLOCK_D, TMA)
    k_heads = heads_of(k + batch * k_batch, heads // group, keys, k_head, k_row, BLOCK_N, D, BLOCK_D, TMA)
    v_heads = heads_of(v + batch * v_batch, heads // group, keys, v_head, v_row, BLOCK_N, D, BLOCK_D, TMA)
    key = first + tl.arange(0, BLOCK_N)
    k_tile = read_rows(k_heads, head_k, first, keys, k_head, k_row, BLOCK_N, D, BLOCK_D, False, TMA).to(DOT)
    v_tile = read_rows(v_heads, head_k, first, keys, v_head, v_row, BLOCK_N, D, BLOCK_D, False, TMA).to(DOT)
    dk_tile = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_tile = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    PARTS: tl.constexpr = BLOCK // BLOCK_M
    for member in range(group):
        head = head_k * group + member
        line = head % layout_heads * columns + column
        begin, end, diagonal = list_of(starts, blocks, line, column - shift // BLOCK, False, CAUSAL)
        row = head.to(tl.int64) * total_queries + batch * queries
        if CAUSAL:
            for part in range(diagonal * PARTS):
                start = column * BLOCK - shift + part * BLOCK_M
                dk_tile, dv_tile = give_keys(
                    dk_tile, dv_tile, k_tile, v_tile, q_heads, g_heads, head, q_head, D, lse + row, delta + row,
                    q_row, heads * D, start, queries, key, keys, shift, -1, 0, scale,
                    False, CAUSAL, True, BLOCK_M, D, BLOCK_D, DOT, PRECISION, TMA,
                )  # fmt: skip
        for index in range((begin + diagonal) * PARTS, end * PARTS):
            start = tl.load(blocks + index // PARTS) * BLOCK + index % PARTS * BLOCK_M
            dk_tile, dv_tile = give_keys(
                dk_tile, dv_tile, k_tile, v_tile, q_heads, g_heads, head, q_head, D, lse + row, delta + row,
                q_row, heads * D, start, queries, key, keys, shift, -1, 0, scale,
                False, CAUSAL, False, BLOCK_M, D, BLOCK_D, DOT, PRECISION, TMA,
            )  # fmt: skip
    at = (batch * keys * (heads // group) + head_k) * D
    store_rows(dk + at, first, keys, heads // group * D, dk_tile * gradient_scale, BLOCK_N, D, BLOCK_D)
    store_rows(dv + at, first, keys, heads // group * D, dv_tile, BLOCK_N, D, BLOCK_D)


@triton.jit
def sparse_queries_kernel(
    q, k, v, g, dq, lse, delta, starts, blocks, order, queries, keys, total_queries,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    heads, group, layout_heads, scale, gradient_scale,
    CAUSAL: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """dq, g [tokens, heads, D]; q, k, v by their strides. The walk is the forward pass's."""
    tiles = queries // BLOCK_M
    rows = queries // BLOCK
    program = tl.program_id(0)
    batch = (program // tiles // heads).to(tl.int64)
    head = program // tiles % heads
    line = head % layout_heads * rows
    row = tl.load(order + line + program % tiles // (BLOCK // BLOCK_M))
    first = row * BLOCK + program % tiles % (BLOCK // BLOCK_M) * BLOCK_M
    shift = keys - queries
    begin, end, diagonal = list_of(starts, blocks, line + row, row + shift // BLOCK, True, CAUSAL)
    head_k = head // group
    at = batch * queries * heads * D
    q_heads = heads_of(q + batch * q_batch, heads, queries, q_head, q_row, BLOCK_M, D, BLOCK_D, TMA)
    g_heads = heads_of(g + at, heads, queries, D, heads * D, BLOCK_M, D, BLOCK_D, TMA)
    k_heads = heads_of(k + batch * k_batch, heads // group, keys, k_head, k_row, BLOCK_N, D, BLOCK_D, TMA)
    v_heads = heads_of(v + batch * v_batch, heads // group, keys, v_head, v_row, BLOCK_N, D, BLOCK_D, TMA)
    query = first + tl.arange(0, BLOCK_M)
    q_tile = read_rows(q_heads, head, first, queries, q_head, q_row, BLOCK_M, D, BLOCK_D, False, TMA).to(DOT)
    g_tile = read_rows(g_heads, head, first, queries, D, heads * D, BLOCK_M, D, BLOCK_D, False, TMA).to(DOT)
    place = head.to(tl.int64) * total_queries + batch * queries + query
    lse_row = tl.load(lse + place)
    delta_row = tl.load(delta + place)
    dq_tile = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    PARTS: tl.constexpr = BLOCK // BLOCK_N
    for index in range(begin * PARTS, (end - diagonal) * PARTS):
        start = tl.load(blocks + index // PARTS) * BLOCK + index % PARTS * BLOCK_N
        dq_tile = give_queries(
            dq_tile, q_tile, g_tile, lse_row, delta_row, k_heads, v_heads, head_k, k_head, v_head, k_row, v_row, query,
            start, keys, shift, -1, 0, scale, False, CAUSAL, False, BLOCK_N, D, BLOCK_D, DOT, PRECISION, TMA,
        )  # fmt: skip
    if CAUSAL:
        for part in range(diagonal * PARTS):
            start = row * BLOCK + shift + part * BLOCK_N
            dq_tile = give_queries(
                dq_tile, q_tile, g_tile, lse_row, delta_row, k_heads, v_heads, head_k, k_head, v_head, k_row, v_row,
                query, start, keys, shift, -1, 0, scale, False, CAUSAL, True, BLOCK_N, D, BLOCK_D, DOT, PRECISION, TMA,
            )  # fmt: skip
    store_rows(dq + at + head * D, first, queries, heads * D, dq_tile * gradient_scale, BLOCK_M, D, BLOCK_D)


def tile(block: int, width: int, x: Tensor, moving: bool, keys: bool = False) -> int:
    """Rows of a tile that stays, or (`moving`) passes by, of x: parts of a block, for which there are registers on
    sm_90, and shared memory where it is less.
    """
    if x.dtype == torch.float32:
        return 16 if moving and (width > 128 or (keys and width > 64)) else min(block, 32)
    if width > 128 and (block < 64 or (moving and (keys or not roomy(x.device)))):
        return 16
    if moving:
        return min(block, 32 if width > 128 or (keys and width > 64) else 64)
    return min(block, 64 if width > 128 else 128)


def threads(rows: int, width: int, dtype: torch.dtype, stages: int, sums: int = 1) -> dict[str, int]:
    """A warpgroup of 4 warps multiplies 64 rows, and adds up one tile: of two it has no registers for the second.

    Exact fp32 is not for matrix units; its operands fill registers.
    """
    if dtype == torch.float32:
        return {"num_warps": 8, "num_stages": 1}
    return {"num_warps": 8 if rows * sums >= 128 or width * sums > 128 else 4, "num_stages": stages}


def block_sparse_forward(
    q: Tensor, k: Tensor, v: Tensor, shapes: Shapes, found: BlockLists, block: int
) -> tuple[Tensor, Tensor]:
    """-> out [tokens, heads, D] in q's dtype, lse [heads, tokens] fp32 (log2 of the sum of exponentials)."""
    rows, columns = (tile(block, shapes.padded, q, moving) for moving in (False, True))
    out = q.new_empty(shapes.tokens, shapes.heads, shapes.width)
    lse = q.new_empty(shapes.heads, shapes.tokens, dtype=torch.float32)
    lists = found.by_queries
    sparse_forward_kernel[(shapes.tokens // rows * shapes.heads,)](
        q, k, v, out, lse, lists.starts, lists.blocks, lists.order, shapes.queries, shapes.keys, shapes.tokens,
        *shapes.strides(q), *shapes.strides(k), *shapes.strides(v),
        shapes.heads, shapes.group, found.shape[0], shapes.log2_scale,
        **constants(shapes, found, block, q, k, v), BLOCK_M=rows, BLOCK_N=columns,
        **threads(rows, shapes.padded, q.dtype, 3),
    )  # fmt: skip
    return out, lse


def constants(shapes: Shapes, found: BlockLists, block: int, *tensors: Tensor) -> dict[str, object]:
    """The compile-time arguments that all three kernels have."""
    all_of_them = shapes.constants(*tensors)
    return {name: all_of_them[name] for name in ("D", "BLOCK_D", "DOT", "PRECISION", "TMA")} | {
        "CAUSAL": found.causal,
        "BLOCK": block,
    }


def block_sparse_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, shapes: Shapes, found: BlockLists, block: int
) -> tuple[Tensor, Tensor, Tensor]:
    """g, out [tokens, heads, D] -> dq like out, dk and dv [tokens_k, heads // group, D]."""
    delta = flash_delta(out, g, lse, shapes)
    dq = torch.empty_like(out)
    dk, dv = (q.new_empty(shapes.tokens_k, shapes.heads // shapes.group, shapes.width) for _ in "kv")
    sizes = (shapes.queries, shapes.keys, shapes.tokens)
    strides = (*shapes.strides(q), *shapes.strides(k), *shapes.strides(v))
    rest = (shapes.heads, shapes.group, found.shape[0], shapes.log2_scale, shapes.scale)
    common = constants(shapes, found, block, q, k, v, g)
    lists = found.by_keys
    stays, moves = (tile(block, shapes.padded, q, moving, keys=True) for moving in (False, True))
    sparse_keys_kernel[(shapes.tokens_k // stays * (shapes.heads // shapes.group),)](
        q, k, v, g, dk, dv, lse, delta, lists.starts, lists.blocks, lists.order, *sizes, *strides, *rest,
        **common, BLOCK_M=moves, BLOCK_N=stays, **threads(stays, shapes.padded, q.dtype, 2, sums=2),
    )  # fmt: skip
    lists = found.by_queries
    stays, moves = (tile(block, shapes.padded, q, moving) for moving in (False, True))
    sparse_queries_kernel[(shapes.tokens // stays * shapes.heads,)](
        q, k, v, g, dq, lse, delta, lists.starts, lists.blocks, lists.order, *sizes, *strides, *rest,
        **common, BLOCK_M=stays, BLOCK_N=moves, **threads(stays, shapes.padded, q.dtype, 2),
    )  # fmt: skip
    return dq, dk, dv
