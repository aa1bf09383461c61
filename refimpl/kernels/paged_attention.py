"""Decoding: one query a sequence over keys and values that lie in pages, wherever there was room (vLLM's cache).

    B sequences of n tokens, H heads of q, H / G of k and v, heads D wide, elements of e bytes
    bytes   2 n (H / G) D e a sequence: k and v once; q, out and the table are nothing beside it
    FLOPs   4 n H D a sequence, 2 G / e a byte: reading is the limit, up to some hundred heads a group

The G heads of a group are rows of one tile, so k and v are read once for all of them; of more than 64 (in fp32 16),
once a tile, the second time out of the L2 cache. A sequence is cut into spans, each a program, until there are enough
programs for the machine ("flash decoding"); a second kernel adds up what they found, 4 (D + 1) bytes a head and span.
Matrix units take no fewer than 16 rows: heads that a group lacks are zeros. No gradient: tokens that are being written
have none.

Kwon et al. 2023 (arXiv:2309.06180); Dao et al. 2023, "Flash-Decoding for long-context inference". Not run on a GPU by
its authors.
"""

import math
from typing import Any

import torch
from torch import Tensor

from refimpl.kernels.attention_tiles import store_rows
from refimpl.kernels.case import Case, short
from refimpl.kernels.checks import floating, integer, one_device
from refimpl.kernels.dots import dots
from refimpl.kernels.flash_shapes import WIDEST, check_scale
from refimpl.kernels.language import on, processors, takes, tl, triton

SPAN = 256  # tokens of a program at least
LOG2_E = 1 / math.log(2)


def paged_attention(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, *, scale: float | None = None
) -> Tensor:
    """q [B, H, D] -> [B, H, D] in q's dtype: each sequence's newest token attends to all of its tokens.

    keys, values [pages, tokens of a page, H / G, D]; table int [B, most pages]: a sequence's pages in order; lengths
    int [B]: its tokens, 0 for none (gives zeros). Entries of the table beyond a sequence's pages are not looked at.
    ValueError for shapes that do not fit, on a CPU also for a length or a page that does not exist, and where a
    gradient is wanted.
    """
    check(q, keys, values, table, lengths)
    scale = check_scale(scale, q.shape[2])
    if min(q.numel(), keys.numel(), table.numel()) == 0 or not takes(q, keys, values):
        return reference(q, keys, values, table, lengths, scale)
    with on(q):
        return decode(q, keys, values, table, lengths, scale)


def check(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor) -> None:
    floating("paged_attention", q=q, keys=keys, values=values)
    integer("paged_attention", table=table, lengths=lengths)
    one_device("paged_attention", q=q, keys=keys, values=values, table=table, lengths=lengths)
    if not q.dtype == keys.dtype == values.dtype:
        raise TypeError(f"paged_attention: q is {q.dtype}, keys {keys.dtype}, values {values.dtype}; one is needed")
    if q.ndim != 3 or keys.ndim != 4 or keys.shape != values.shape or keys.shape[3] != q.shape[2]:
        found = f"q {list(q.shape)}, keys {list(keys.shape)}, values {list(values.shape)}"
        raise ValueError(f"paged_attention: {found}; [B, H, D] and twice [pages, page, heads, D] are needed")
    if not 1 <= q.shape[2] <= WIDEST or keys.shape[2] == 0 or q.shape[1] % keys.shape[2]:
        raise ValueError(
            f"paged_attention: {q.shape[1]} heads of {q.shape[2]} over {keys.shape[2]}; D is 1 to {WIDEST}"
        )
    if table.ndim != 2 or len(table) != len(q) or lengths.shape != (len(q),):
        found = f"table {list(table.shape)}, lengths {list(lengths.shape)}"
        raise ValueError(f"paged_attention: {found}; [{len(q)}, pages] and [{len(q)}] are needed")
    if torch.is_grad_enabled() and (q.requires_grad or keys.requires_grad or values.requires_grad):
        raise ValueError("paged_attention has no gradient: call it under torch.no_grad(), or detach its inputs")
    if q.is_cpu and len(q):
        page = keys.shape[1]
        if bool((lengths < 0).any()) or int(lengths.max()) > table.shape[1] * page:
            raise ValueError(
                f"paged_attention: lengths {lengths.tolist()}; the table has {table.shape[1]} pages of {page}"
            )
        used = torch.arange(table.shape[1]) * page < lengths[:, None]
        if bool((used & ((table < 0) | (table >= len(keys)))).any()):
            raise ValueError(f"paged_attention: a sequence's page is not among the {len(keys)} that there are")


def reference(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, scale: float) -> Tensor:
    """A sequence at a time, by torch's operators, in fp32 (fp64 for fp64)."""
    group = q.shape[1] // keys.shape[2]
    out = torch.zeros_like(q)
    for sequence, length in enumerate(lengths.tolist()):
        if length:
            pages = table[sequence, : -(-length // keys.shape[1])].long()
            k, v = (x[pages].flatten(0, 1)[:length].repeat_interleave(group, 1) for x in (keys, values))  # [n, H, D]
            wide = torch.promote_types(q.dtype, torch.float32)
            scores = torch.einsum("hd,nhd->hn", q[sequence].to(wide), k.to(wide)) * scale
            out[sequence] = torch.einsum("hn,nhd->hd", scores.softmax(1), v.to(wide)).to(q.dtype)
    return out


@triton.jit
def paged_kernel(
    q, keys, values, table, lengths, partial, lse,
    q_batch, q_head, k_page: tl.int64, k_row, k_head, v_page: tl.int64, v_row, v_head, table_row,
    heads, group, page, spans, span, scale, tiles,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """partial [spans, B, heads, D] fp32, weighted values of a span; lse [spans, B, heads], in powers of 2."""
    program = tl.program_id(0)
    part = program % spans
    first_member = program // spans % tiles * BLOCK_G
    head_k = program // spans // tiles % (heads // group)
    sequence = (program // spans // tiles // (heads // group)).to(tl.int64)
    sequences = tl.num_programs(0) // spans // tiles // (heads // group)
    length = tl.load(lengths + sequence).to(tl.int32)
    member = first_member + tl.arange(0, BLOCK_G)
    dims = tl.arange(0, BLOCK_D)
    head = head_k * group + member
    q_at = q + sequence * q_batch + head[:, None] * q_head + dims[None, :]
    q_tile = tl.load(q_at, mask=(member < group)[:, None] & (dims < D)[None, :], other=0.0).to(DOT)
    total = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    largest = tl.full([BLOCK_G], float("-inf"), tl.float32)
    norm = tl.zeros([BLOCK_G], tl.float32)
    for start in range(part * span, tl.minimum((part + 1) * span, length), BLOCK_N):
        token = start + tl.arange(0, BLOCK_N)
        there = token < length
        mine = tl.load(table + sequence * table_row + token // page, mask=there, other=0).to(tl.int64)
        mask = there[:, None] & (dims < D)[None, :]
        k_at = keys + (mine * k_page + token % page * k_row + head_k * k_head)[:, None] + dims[None, :]
        k = tl.load(k_at, mask=mask, other=0.0).to(DOT)
        scores = tl.dot(q_tile, tl.trans(k), input_precision=PRECISION) * scale
        scores = tl.where(there[None, :], scores, float("-inf"))
        larger = tl.maximum(largest, tl.max(scores, 1))
        p = tl.exp2(scores - larger[:, None])
        shrink = tl.exp2(largest - larger)
        v_at = values + (mine * v_page + token % page * v_row + head_k * v_head)[:, None] + dims[None, :]
        v = tl.load(v_at, mask=mask, other=0.0).to(DOT)
        total = tl.dot(p.to(DOT), v, total * shrink[:, None], input_precision=PRECISION)
        norm = norm * shrink + tl.sum(p, 1)
        largest = larger
    if part * span < length:
        first = ((part * sequences + sequence) * heads + head_k * group) * D
        store_rows(partial + first, first_member, group, D, total / norm[:, None], BLOCK_G, D, BLOCK_D)
    else:
        norm = tl.full([BLOCK_G], 1.0, tl.float32)  # nothing: exp2(-inf) = 0 of it
    place = (part * sequences + sequence) * heads + head
    tl.store(lse + place, largest + tl.log2(norm), mask=member < group)


@triton.jit
def combine_kernel(
    partial, lse, out, rows, spans,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """out [rows, D]: the spans' values [spans, rows, D], weighted by their shares of the sum of exponentials."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    number = tl.arange(0, BLOCK_S)
    found = tl.load(lse + number * rows + row, mask=number < spans, other=float("-inf"))
    largest = tl.max(found, 0)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    norm = tl.sum(tl.exp2(found - largest), 0)
    total = tl.zeros([BLOCK_D], tl.float32)
    for part in range(spans):
        share = tl.load(lse + part * rows + row)
        width = tl.where(share == float("-inf"), 0, D)  # a span without tokens wrote no values
        value = tl.load(partial + (part * rows + row) * D + dims, mask=dims < width, other=0.0)
        total += value * tl.exp2(share - largest)
    total = total / tl.where(norm == 0, 1.0, norm)
    tl.store(out + row * D + dims, total.to(out.dtype.element_ty), mask=dims < D)


def cut(group: int, width: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Heads and tokens of a program's tiles, its warps and its loads in flight: what there are registers for."""
    heads = max(16, triton.next_power_of_2(group))
    if dtype == torch.float32:  # exact products are not for matrix units, and their operands fill registers
        return min(heads, 16), 32 if width <= 128 else 16, 8, 2
    return min(heads, 64), 64 if width <= 128 else 32, 4, 3


def decode(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, scale: float) -> Tensor:
    """The kernels; shapes of `paged_attention`."""
    q, keys, values, table, lengths = (
        x if x.stride(-1) == 1 else x.contiguous() for x in (q, keys, values, table, lengths)
    )
    (batch, heads, width), shared = q.shape, keys.shape[2]
    longest = table.shape[1] * keys.shape[1]  # what a sequence may have: what it has, the device knows
    block_d = max(16, triton.next_power_of_2(width))
    rows, columns, warps, stages = cut(heads // shared, block_d, q.dtype)
    tiles = triton.cdiv(heads // shared, rows)
    wanted = max(1, 4 * processors(q.device) // (batch * shared * tiles))
    span = max(SPAN, triton.cdiv(triton.cdiv(longest, wanted), 64) * 64)
    spans = triton.cdiv(longest, span)
    partial = q.new_empty(spans, batch, heads, width, dtype=torch.float32)
    lse = q.new_empty(spans, batch, heads, dtype=torch.float32)
    paged_kernel[(batch * shared * tiles * spans,)](
        q, keys, values, table, lengths, partial, lse,
        q.stride(0), q.stride(1), *keys.stride()[:3], *values.stride()[:3], table.stride(0),
        heads, heads // shared, keys.shape[1], spans, span, scale * LOG2_E, tiles,
        D=width, BLOCK_D=block_d, BLOCK_G=rows, BLOCK_N=columns, num_warps=warps, num_stages=stages, **dots(q.dtype),
    )  # fmt: skip
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    combine_kernel[(batch * heads,)](
        partial, lse, out, batch * heads, spans,
        D=width, BLOCK_D=block_d, BLOCK_S=triton.next_power_of_2(spans), num_warps=4,
    )  # fmt: skip
    return out


def _case(dtype: torch.dtype, batch: int, heads: int, shared: int, length: int, width: int, page: int) -> Case:
    """`batch` sequences of `length` tokens, their pages shuffled."""
    pages = -(-length // page)

    def inputs(device: torch.device) -> tuple[Any, ...]:
        shuffled = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(0)).view(batch, pages)
        cache = (torch.randn(batch * pages, page, shared, width, device=device, dtype=dtype) for _ in "kv")
        lengths = torch.full((batch,), length, dtype=torch.int32, device=device)
        return torch.randn(batch, heads, width, device=device, dtype=dtype), *cache, shuffled.int().to(device), lengths

    def oracle(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
        return reference(q, keys, values, table, lengths, width**-0.5)

    moved = (2 * batch * length * shared + 2 * batch * heads) * width * dtype.itemsize
    return Case(
        f"paged_attention {short(dtype)} {batch}x{heads}/{shared}x{length}x{width} pages of {page}",
        paged_attention, oracle, inputs, moved,
    )  # fmt: skip


CASES = (
    _case(torch.bfloat16, 32, 32, 8, 8192, 128, 16),
    _case(torch.bfloat16, 8, 128, 1, 8192, 256, 16),
    _case(torch.float32, 8, 64, 4, 2048, 256, 16),
)
SMALL = (_case(torch.float32, 4, 8, 2, 512, 64, 16),)
