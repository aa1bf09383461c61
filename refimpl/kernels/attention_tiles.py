"""One tile of attention: what a block of queries and a block of keys do to each other, shared by all attention kernels.

Scores never leave the chip. The forward pass keeps for each query the largest score so far, the sum of exponentials and
the weighted values (Milakov & Gimelshein 2018, arXiv:1805.02867); the backward pass makes the probabilities again from
the row's log-sum-exp. Exponentials are powers of 2, which the hardware has: scores are multiplied by log2(e) first.

A query with nothing to see gets zeros: its sum is 0, and its log-sum-exp is kept as +inf, so that its probabilities are
0 in the backward pass without a mask. Rows beyond the end of a sequence are loaded with +inf for the same reason.

    M   queries of a tile (BLOCK_M)
    N   keys of a tile (BLOCK_N)
    D   head width, padded to a power of 2 in BLOCK_D
    DOT the type in which tiles are multiplied: the inputs' own; fp32 under the interpreter, whose bf16 is wrong
"""

from refimpl.kernels.language import tl, triton


@triton.jit
def sequence_of(
    q, k, v, starts_q, starts_k, batch, queries, keys, q_batch, q_row, k_batch, k_row, v_batch, v_row,
    RAGGED: tl.constexpr,
):  # fmt: skip
    """Sequence `batch` -> where its q, k and v begin, the numbers of its first query and key among all, and how many
    it has of each. RAGGED: sequences lie one after the other, from starts_q and starts_k on.
    """
    if RAGGED:
        first_q = tl.load(starts_q + batch).to(tl.int64)
        first_k = tl.load(starts_k + batch).to(tl.int64)
        queries = (tl.load(starts_q + batch + 1) - first_q).to(tl.int32)
        keys = (tl.load(starts_k + batch + 1) - first_k).to(tl.int32)
        return q + first_q * q_row, k + first_k * k_row, v + first_k * v_row, first_q, first_k, queries, keys
    else:
        return (
            q + batch * q_batch, k + batch * k_batch, v + batch * v_batch, batch * queries, batch * keys, queries, keys
        )  # fmt: skip


@triton.jit
def heads_of(
    base, heads, length, head_stride, stride,
    ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """A tensor [heads, length, D] for `read_rows`: with TMA a descriptor, by which the hardware's copy engine reads."""
    if TMA:
        return tl.make_tensor_descriptor(base, [heads, length, D], [head_stride, stride, 1], [1, ROWS, BLOCK_D])
    else:
        return base


@triton.jit
def read_rows(
    tensor, head, start, length, head_stride, stride,
    ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, CHECK: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """`load_rows` of a head of what `heads_of` gave. The copy engine needs no registers for addresses."""
    if TMA:
        return tensor.load([head, start, 0]).reshape(ROWS, BLOCK_D)
    else:
        return load_rows(tensor + tl.cast(head, tl.int64) * head_stride, start, length, stride, ROWS, D, BLOCK_D, CHECK)


@triton.jit
def load_rows(
    base, start, length, stride, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, CHECK: tl.constexpr
):
    """Rows from `start` on of a [length, D] matrix -> [ROWS, BLOCK_D]; zeros outside. CHECK: rows may be outside."""
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK_D)[None, :]
    pointers = base + tl.cast(start, tl.int64) * stride + row * stride + column
    if CHECK and D != BLOCK_D:
        return tl.load(pointers, mask=(start + row < length) & (column < D), other=0.0)
    elif CHECK:
        return tl.load(pointers, mask=start + row < length, other=0.0)
    elif D != BLOCK_D:
        return tl.load(pointers, mask=column < D, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def store_rows(base, start, length, stride, tile, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """tile [ROWS, BLOCK_D] into rows start .. of a [length, D] matrix, in that matrix's dtype; nothing outside."""
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK_D)[None, :]
    pointers = base + tl.cast(start, tl.int64) * stride + row * stride + column
    if D != BLOCK_D:
        tl.store(pointers, tile.to(base.dtype.element_ty), mask=(start + row < length) & (column < D))
    else:
        tl.store(pointers, tile.to(base.dtype.element_ty), mask=start + row < length)


@triton.jit
def seen(query, key, keys, shift, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Whether `query` sees `key`: query + shift - left <= key <= query + shift + right, and key < keys (broadcast)."""
    sees = key < keys
    if RIGHT:
        sees = sees & (key <= query + shift + right)
    if LEFT:
        sees = sees & (key >= query + shift - left)
    return sees


@triton.jit
def walk(first, last, keys, shift, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr, BLOCK: tl.constexpr):
    """The blocks of keys that the queries first .. last meet -> whole, end, edges, low, before, after.

    From `whole` to `end` every query sees every key. `edges` blocks need a mask: `before` of them from `low` on, at the
    window's left, the others from `after` on, at the diagonal or the sequence's end (`edge` gives the start of each).
    """
    high = keys
    end = keys
    if RIGHT:
        high = tl.minimum(tl.maximum(last + shift + right + 1, 0), keys)
        end = tl.minimum(tl.maximum(first + shift + right + 1, 0), keys)
    end = end // BLOCK * BLOCK
    low = 0
    whole = 0
    before = 0
    if LEFT:
        low = tl.maximum(first + shift - left, 0) // BLOCK * BLOCK
        whole = tl.cdiv(tl.maximum(last + shift - left, 0), BLOCK) * BLOCK
        before = tl.cdiv(tl.maximum(tl.minimum(whole, high) - low, 0), BLOCK)
    after = tl.maximum(whole, end)
    edges = before + tl.cdiv(tl.maximum(high - after, 0), BLOCK)
    return whole, end, edges, low, before, after


@triton.jit
def edge(index, low, before, after, BLOCK: tl.constexpr):
    """Where edge number `index` of `walk` starts."""
    return tl.where(index < before, low + index * BLOCK, after + (index - before) * BLOCK)


@triton.jit
def attend(
    total, largest, norm, q, k_heads, v_heads, head, k_head, v_head, k_stride, v_stride,
    query, start, keys, shift, left, right, scale,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, MASKED: tl.constexpr, BLOCK_N: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Let the queries q [M, D] see the keys start .. start + BLOCK_N; MASKED: perhaps not all of them.

    total [M, D] weighted values so far, largest [M] score so far times log2(e), norm [M] sum of exponentials so far.
    """
    k = read_rows(k_heads, head, start, keys, k_head, k_stride, BLOCK_N, D, BLOCK_D, MASKED, TMA).to(DOT)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [M, N]
    if MASKED:
        key = start + tl.arange(0, BLOCK_N)
        sees = seen(query[:, None], key[None, :], keys, shift, left, right, LEFT, RIGHT)
        scores = tl.where(sees, scores * scale, float("-inf"))
        larger = tl.maximum(largest, tl.max(scores, 1))
        reference = tl.where(larger == float("-inf"), 0.0, larger)  # nothing seen yet: exp2(-inf - 0) = 0, not nan
        p = tl.exp2(scores - reference[:, None])
        shrink = tl.exp2(largest - reference)
    else:
        larger = tl.maximum(largest, tl.max(scores, 1) * scale)
        p = tl.exp2(scores * scale - larger[:, None])  # one fused multiply-add and one exponential a score
        shrink = tl.exp2(largest - larger)
    v = read_rows(v_heads, head, start, keys, v_head, v_stride, BLOCK_N, D, BLOCK_D, MASKED, TMA).to(DOT)
    norm = norm * shrink + tl.sum(p, 1)
    total = tl.dot(p.to(DOT), v, total * shrink[:, None], input_precision=PRECISION)
    return total, larger, norm


@triton.jit
def give_keys(
    dk, dv, k, v, q_heads, g_heads, head, q_head, g_head, lse_base, delta_base, q_stride, g_stride,
    start, queries, key, keys, shift, left, right, scale,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, MASKED: tl.constexpr, BLOCK_M: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Add to dk, dv [N, D] what the queries start .. start + BLOCK_M send back to the keys k, v [N, D].

    Everything is made transposed, so that no probability is: keys down, queries across.
    """
    q = read_rows(q_heads, head, start, queries, q_head, q_stride, BLOCK_M, D, BLOCK_D, MASKED, TMA).to(DOT)
    query = start + tl.arange(0, BLOCK_M)
    if MASKED:
        lse = tl.load(lse_base + query, mask=query < queries, other=float("inf"))
        delta = tl.load(delta_base + query, mask=query < queries, other=0.0)
    else:
        lse = tl.load(lse_base + query)
        delta = tl.load(delta_base + query)
    p = tl.exp2(tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale - lse[None, :])  # [N, M]
    if MASKED:
        p = tl.where(seen(query[None, :], key[:, None], keys, shift, left, right, LEFT, RIGHT), p, 0.0)
    g = read_rows(g_heads, head, start, queries, g_head, g_stride, BLOCK_M, D, BLOCK_D, MASKED, TMA).to(DOT)
    dv = tl.dot(p.to(DOT), g, dv, input_precision=PRECISION)
    ds = p * (tl.dot(v, tl.trans(g), input_precision=PRECISION) - delta[None, :])
    dk = tl.dot(ds.to(DOT), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def give_queries(
    dq, q, g, lse, delta, k_heads, v_heads, head, k_head, v_head, k_stride, v_stride,
    query, start, keys, shift, left, right, scale,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, MASKED: tl.constexpr, BLOCK_N: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Add to dq [M, D] what the keys from `start` on send back to the queries q [M, D]; g is out's gradient."""
    k = read_rows(k_heads, head, start, keys, k_head, k_stride, BLOCK_N, D, BLOCK_D, MASKED, TMA).to(DOT)
    v = read_rows(v_heads, head, start, keys, v_head, v_stride, BLOCK_N, D, BLOCK_D, MASKED, TMA).to(DOT)
    p = tl.exp2(tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale - lse[:, None])  # [M, N]
    if MASKED:
        key = start + tl.arange(0, BLOCK_N)
        p = tl.where(seen(query[:, None], key[None, :], keys, shift, left, right, LEFT, RIGHT), p, 0.0)
    ds = p * (tl.dot(g, tl.trans(v), input_precision=PRECISION) - delta[:, None])
    return tl.dot(ds.to(DOT), k, dq, input_precision=PRECISION)
