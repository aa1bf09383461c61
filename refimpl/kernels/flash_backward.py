"""FlashAttention backward: probabilities are made again from the log-sum-exp, once for the keys, once for the queries.

    ds = p (g v^T - delta), delta = sum(g out) of a row;  dv = p^T g,  dk = scale ds^T q,  dq = scale ds k

One program a block of keys adds up dk and dv over all queries that see it, of all heads of its group; one a block of
queries adds up dq. That is 7 products of tiles where 5 would do if dq were added up in memory by atomics; but nothing
is added in an order that varies, so the same inputs give the same bits. `out` comes back in the inputs' dtype, as
FlashAttention reads it too: in 16 bits its rounding, through delta, is nearly all of the error of dq and dk.
FlashAttention-2 (arXiv:2307.08691), 3.1.
"""

import torch
from torch import Tensor

from refimpl.kernels.attention_tiles import (
    edge,
    give_keys,
    give_queries,
    heads_of,
    load_rows,
    read_rows,
    sequence_of,
    store_rows,
    walk,
)
from refimpl.kernels.flash_shapes import Shapes, Tiles, roomy
from refimpl.kernels.language import tl, triton


@triton.jit
def flash_delta_kernel(
    out, g, delta, rows, heads,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """delta [heads, tokens] = sum over D of out * g, both [tokens, heads, D]; `rows` = tokens * heads."""
    start = tl.program_id(0) * BLOCK_M
    a = load_rows(out, start, rows, D, BLOCK_M, D, BLOCK_D, True).to(tl.float32)
    b = load_rows(g, start, rows, D, BLOCK_M, D, BLOCK_D, True).to(tl.float32)
    row = start + tl.arange(0, BLOCK_M)
    place = (row % heads).to(tl.int64) * (rows // heads) + row // heads
    tl.store(delta + place, tl.sum(a * b, 1), mask=row < rows)


@triton.jit
def flash_keys_kernel(
    q, k, v, g, dk, dv, lse, delta, starts_q, starts_k, queries, keys, total_queries,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    heads, group, blocks, left, right, scale, gradient_scale,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, RAGGED: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """dk, dv [tokens, heads // group, D]; g [tokens, heads, D]; q, k, v by their strides."""
    program = tl.program_id(0)
    first = program % blocks * BLOCK_N
    batch = (program // blocks // (heads // group)).to(tl.int64)
    head_k = program // blocks % (heads // group)
    q_base, k_base, v_base, token_q, token_k, queries, keys = sequence_of(
        q, k, v, starts_q, starts_k, batch, queries, keys, q_batch, q_row, k_batch, k_row, v_batch, v_row, RAGGED
    )
    if RAGGED and first >= keys:
        return
    shift = keys - queries
    key = first + tl.arange(0, BLOCK_N)
    k_heads = heads_of(k_base, heads // group, keys, k_head, k_row, BLOCK_N, D, BLOCK_D, TMA)
    v_heads = heads_of(v_base, heads // group, keys, v_head, v_row, BLOCK_N, D, BLOCK_D, TMA)
    k_tile = read_rows(k_heads, head_k, first, keys, k_head, k_row, BLOCK_N, D, BLOCK_D, True, TMA).to(DOT)
    v_tile = read_rows(v_heads, head_k, first, keys, v_head, v_row, BLOCK_N, D, BLOCK_D, True, TMA).to(DOT)
    dk_tile = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_tile = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    last = tl.minimum(first + BLOCK_N, keys) - 1
    # Seen from a key, the window is mirrored: the query at most `left` after it, at most `right` before it.
    whole, end, edges, low, before, after = walk(first, last, queries, -shift, right, left, RIGHT, LEFT, BLOCK_M)
    q_heads = heads_of(q_base, heads, queries, q_head, q_row, BLOCK_M, D, BLOCK_D, TMA)
    g_heads = heads_of(g + token_q * heads * D, heads, queries, D, heads * D, BLOCK_M, D, BLOCK_D, TMA)
    head = head_k * group
    index = 0
    for _ in range(edges * group):  # one loop over heads and blocks: a nest of loops needs more registers
        row = head.to(tl.int64) * total_queries + token_q
        dk_tile, dv_tile = give_keys(
            dk_tile, dv_tile, k_tile, v_tile, q_heads, g_heads, head, q_head, D, lse + row, delta + row,
            q_row, heads * D, edge(index, low, before, after, BLOCK_M), queries, key, keys, shift, left, right,
            scale, LEFT, RIGHT, True, BLOCK_M, D, BLOCK_D, DOT, PRECISION, TMA,
        )  # fmt: skip
        index += 1
        head += index == edges
        index = tl.where(index == edges, 0, index)
    head = head_k * group
    start = whole
    for _ in range(tl.maximum(end - whole, 0) // BLOCK_M * group):
        row = head.to(tl.int64) * total_queries + token_q
        dk_tile, dv_tile = give_keys(
            dk_tile, dv_tile, k_tile, v_tile, q_heads, g_heads, head, q_head, D, lse + row, delta + row,
            q_row, heads * D, start, queries, key, keys, shift, left, right,
            scale, LEFT, RIGHT, False, BLOCK_M, D, BLOCK_D, DOT, PRECISION, TMA,
        )  # fmt: skip
        start += BLOCK_M
        head += start == end
        start = tl.where(start == end, whole, start)
    place = (token_k * (heads // group) + head_k) * D
    store_rows(dk + place, first, keys, heads // group * D, dk_tile * gradient_scale, BLOCK_N, D, BLOCK_D)
    store_rows(dv + place, first, keys, heads // group * D, dv_tile, BLOCK_N, D, BLOCK_D)


@triton.jit
def flash_queries_kernel(
    q, k, v, g, dq, lse, delta, starts_q, starts_k, queries, keys, total_queries,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    heads, group, blocks, left, right, scale, gradient_scale,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, RAGGED: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """dq, g [tokens, heads, D]; q, k, v by their strides. The walk is the forward pass's."""
    program = tl.program_id(0)
    first = (blocks - 1 - program % blocks) * BLOCK_M
    batch = (program // blocks // heads).to(tl.int64)
    head = program // blocks % heads
    q_base, k_base, v_base, token, _, queries, keys = sequence_of(
        q, k, v, starts_q, starts_k, batch, queries, keys, q_batch, q_row, k_batch, k_row, v_batch, v_row, RAGGED
    )
    if RAGGED and first >= queries:
        return
    shift = keys - queries
    query = first + tl.arange(0, BLOCK_M)
    place = (token * heads + head) * D
    q_heads = heads_of(q_base, heads, queries, q_head, q_row, BLOCK_M, D, BLOCK_D, TMA)
    g_heads = heads_of(g + token * heads * D, heads, queries, D, heads * D, BLOCK_M, D, BLOCK_D, TMA)
    q_tile = read_rows(q_heads, head, first, queries, q_head, q_row, BLOCK_M, D, BLOCK_D, True, TMA).to(DOT)
    g_tile = read_rows(g_heads, head, first, queries, D, heads * D, BLOCK_M, D, BLOCK_D, True, TMA).to(DOT)
    row = head.to(tl.int64) * total_queries + token + query
    lse_row = tl.load(lse + row, mask=query < queries, other=float("inf"))
    delta_row = tl.load(delta + row, mask=query < queries, other=0.0)
    head_k = head // group
    k_heads = heads_of(k_base, heads // group, keys, k_head, k_row, BLOCK_N, D, BLOCK_D, TMA)
    v_heads = heads_of(v_base, heads // group, keys, v_head, v_row, BLOCK_N, D, BLOCK_D, TMA)
    dq_tile = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    last = tl.minimum(first + BLOCK_M, queries) - 1
    whole, end, edges, low, before, after = walk(first, last, keys, shift, left, right, LEFT, RIGHT, BLOCK_N)
    for index in range(edges):
        start = edge(index, low, before, after, BLOCK_N)
        dq_tile = give_queries(
            dq_tile, q_tile, g_tile, lse_row, delta_row, k_heads, v_heads, head_k, k_head, v_head, k_row, v_row,
            query, start, keys, shift, left, right, scale, LEFT, RIGHT, True, BLOCK_N, D, BLOCK_D, DOT, PRECISION, TMA,
        )  # fmt: skip
    for start in range(whole, end, BLOCK_N):
        dq_tile = give_queries(
            dq_tile, q_tile, g_tile, lse_row, delta_row, k_heads, v_heads, head_k, k_head, v_head, k_row, v_row,
            query, start, keys, shift, left, right, scale, LEFT, RIGHT, False, BLOCK_N, D, BLOCK_D, DOT, PRECISION, TMA,
        )  # fmt: skip
    store_rows(dq + place, first, queries, heads * D, dq_tile * gradient_scale, BLOCK_M, D, BLOCK_D)


def backward_tiles(width: int, dtype: torch.dtype, device: torch.device) -> tuple[Tiles, Tiles]:
    """For the keys' kernel and the queries'; up to width 128 none spills a register (FlexAttention's would),
    but fp32 of a width between 64 and 128, such as 80: 224 bytes a thread in the queries'.
    """
    if dtype == torch.float32:
        if width <= 64:
            return Tiles(32, 32, 8, 1), Tiles(64, 32, 8, 1)
        return Tiles(16, 32, 8, 1), Tiles(32, 32 if width <= 128 else 16, 8, 1)
    if width < 64:
        return Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 3)
    if width <= 128:
        return Tiles(64 if width == 64 else 32, 128, 8, 3), Tiles(128, 64, 8, 2)
    return Tiles(16, 64, 8, 2), Tiles(64, 32 if roomy(device) else 16, 8, 2)


def flash_delta(out: Tensor, g: Tensor, lse: Tensor, shapes: Shapes) -> Tensor:
    """-> delta [heads, tokens] fp32, as lse, of out and g [tokens, heads, D]."""
    delta, rows = torch.empty_like(lse), shapes.tokens * shapes.heads
    block = min(64, 8192 // shapes.padded)  # at most 64 elements of each a thread: with more sm_100 spills
    flash_delta_kernel[(triton.cdiv(rows, block),)](
        out, g, delta, rows, shapes.heads, D=shapes.width, BLOCK_D=shapes.padded, BLOCK_M=block, num_warps=4
    )
    return delta


def flash_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, shapes: Shapes
) -> tuple[Tensor, Tensor, Tensor]:
    """g, out [tokens, heads, D] -> dq like out, dk and dv [tokens_k, heads // group, D]."""
    by_keys, by_queries = backward_tiles(shapes.padded, q.dtype, q.device)
    delta = flash_delta(out, g, lse, shapes)
    dq = torch.empty_like(out)
    dk, dv = (q.new_empty(shapes.tokens_k, shapes.heads // shapes.group, shapes.width) for _ in "kv")
    lengths = (shapes.starts_q, shapes.starts_k, shapes.queries, shapes.keys, shapes.tokens)
    strides = (*shapes.strides(q), *shapes.strides(k), *shapes.strides(v))
    window = (shapes.left, shapes.right, shapes.log2_scale, shapes.scale)
    blocks = triton.cdiv(shapes.keys, by_keys.columns)
    flash_keys_kernel[(blocks * shapes.batch * (shapes.heads // shapes.group),)](
        q, k, v, g, dk, dv, lse, delta, *lengths, *strides, shapes.heads, shapes.group, blocks, *window,
        **shapes.constants(q, k, v, g), BLOCK_M=by_keys.rows, BLOCK_N=by_keys.columns,
        num_warps=by_keys.warps, num_stages=by_keys.stages,
    )  # fmt: skip
    blocks = triton.cdiv(shapes.queries, by_queries.rows)
    flash_queries_kernel[(blocks * shapes.batch * shapes.heads,)](
        q, k, v, g, dq, lse, delta, *lengths, *strides, shapes.heads, shapes.group, blocks, *window,
        **shapes.constants(q, k, v, g), BLOCK_M=by_queries.rows, BLOCK_N=by_queries.columns,
        num_warps=by_queries.warps, num_stages=by_queries.stages,
    )  # fmt: skip
    return dq, dk, dv
