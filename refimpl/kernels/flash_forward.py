"""FlashAttention forward: one program a block of queries, which walks over the keys that its queries see.

The keys at the edges of what they see (the window's left, the diagonal, the end) need a mask and come first; those in
between need none. Blocks of queries with the most keys start first, so that none is left alone at the end.
"""

import torch
from torch import Tensor

from refimpl.kernels.attention_tiles import attend, edge, heads_of, read_rows, sequence_of, store_rows, walk
from refimpl.kernels.flash_shapes import Shapes, Tiles, roomy
from refimpl.kernels.language import tl, triton


@triton.jit
def flash_forward_kernel(
    q, k, v, out, lse, starts_q, starts_k, queries, keys, total_queries,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    heads, group, blocks, left, right, scale,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, RAGGED: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """out [tokens, heads, D], lse [heads, tokens] in powers of 2; q, k, v by their strides."""
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
    q_heads = heads_of(q_base, heads, queries, q_head, q_row, BLOCK_M, D, BLOCK_D, TMA)
    q_tile = read_rows(q_heads, head, first, queries, q_head, q_row, BLOCK_M, D, BLOCK_D, True, TMA).to(DOT)
    head_k = head // group
    k_heads = heads_of(k_base, heads // group, keys, k_head, k_row, BLOCK_N, D, BLOCK_D, TMA)
    v_heads = heads_of(v_base, heads // group, keys, v_head, v_row, BLOCK_N, D, BLOCK_D, TMA)
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    norm = tl.zeros([BLOCK_M], tl.float32)
    last = tl.minimum(first + BLOCK_M, queries) - 1
    whole, end, edges, low, before, after = walk(first, last, keys, shift, left, right, LEFT, RIGHT, BLOCK_N)
    for index in range(edges):
        start = edge(index, low, before, after, BLOCK_N)
        total, largest, norm = attend(
            total, largest, norm, q_tile, k_heads, v_heads, head_k, k_head, v_head, k_row, v_row,
            query, start, keys, shift, left, right, scale, LEFT, RIGHT, True, BLOCK_N, D, BLOCK_D, DOT, PRECISION, TMA,
        )  # fmt: skip
    for start in range(whole, end, BLOCK_N):
        total, largest, norm = attend(
            total, largest, norm, q_tile, k_heads, v_heads, head_k, k_head, v_head, k_row, v_row,
            query, start, keys, shift, left, right, scale, LEFT, RIGHT, False, BLOCK_N, D, BLOCK_D, DOT, PRECISION, TMA,
        )  # fmt: skip
    nothing = norm == 0
    norm = tl.where(nothing, 1.0, norm)
    total = total / norm[:, None]
    row = tl.where(nothing, float("inf"), largest + tl.log2(norm))
    store_rows(out + (token * heads + head) * D, first, queries, heads * D, total, BLOCK_M, D, BLOCK_D)
    tl.store(lse + head.to(tl.int64) * total_queries + token + query, row, mask=query < queries)


def forward_tiles(width: int, dtype: torch.dtype, device: torch.device) -> Tiles:
    """By the padded head width: as large as registers allow on sm_90, and shared memory where it is less.

    On an H100 torch's FlexAttention takes (128, 128, 4, 3) at 64, (128, 64, 8, 3) at 128 and (64, 32, 4, 3) at 256, in
    16 bits (torch/_inductor/template_heuristics/triton.py).
    """
    if dtype == torch.float32:
        return Tiles(64, 32, 8, 2) if width <= 64 else Tiles(32 if width <= 128 else 16, 32, 8, 1)
    if width <= 64:
        return Tiles(128, 128, 8, 3)
    if width <= 128:
        return Tiles(128, 128, 8, 2)
    return Tiles(64, 32, 4, 3) if roomy(device) else Tiles(64, 32, 8, 2)


def flash_forward(q: Tensor, k: Tensor, v: Tensor, shapes: Shapes) -> tuple[Tensor, Tensor]:
    """-> out [tokens, heads, D] in q's dtype, lse [heads, tokens] fp32 (log2 of the sum of exponentials)."""
    tiles = forward_tiles(shapes.padded, q.dtype, q.device)
    out = q.new_empty(shapes.tokens, shapes.heads, shapes.width)
    lse = q.new_empty(shapes.heads, shapes.tokens, dtype=torch.float32)
    blocks = triton.cdiv(shapes.queries, tiles.rows)
    flash_forward_kernel[(blocks * shapes.batch * shapes.heads,)](
        q, k, v, out, lse, shapes.starts_q, shapes.starts_k, shapes.queries, shapes.keys, shapes.tokens,
        *shapes.strides(q), *shapes.strides(k), *shapes.strides(v),
        shapes.heads, shapes.group, blocks, shapes.left, shapes.right, shapes.log2_scale,
        **shapes.constants(q, k, v), BLOCK_M=tiles.rows, BLOCK_N=tiles.columns,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out, lse
