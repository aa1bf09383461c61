"""Grades chapter 14's kernels of tiles: the order of a product's tiles, the product, and attention."""

import math
from typing import Any

import torch

from refimpl.grading.compare import equal, require
from refimpl.grading.grade import on_ranks
from refimpl.grading.kernels import bytes_of, launch, moved, multiplied, no_larger, tiles_of, times, within
from refimpl.grading.memory import untouched
from refimpl.grading.rank import Answer, case
from refimpl.grading.traffic import WatchedGroup


@on_ranks(1)
def test_grouped_tile(answer: Answer, group: WatchedGroup) -> None:
    for m, n, band in ((3, 2, 2), (8, 8, 4), (7, 3, 4), (5, 5, 3), (2, 5, 8), (5, 4, 1), (1, 1, 4)):
        case(f"{m} x {n} tiles, GROUP = {band}")
        found = tiles_of(answer.grouped_tile, m, n, band)
        wanted = [(i, j) for top in range(0, m, band) for j in range(n) for i in range(top, min(top + band, m))]
        outside = [t for t in found if not (0 <= t[0] < m and 0 <= t[1] < n)]
        require(not outside, f"tile {outside[:1]} does not exist: there are {m} x {n}")
        twice = sorted({t for t in found if found.count(t) > 1})
        missing = sorted({*wanted} - {*found})
        advice = "the last band has fewer rows" if m % band else "each pid must have a tile of its own"
        require(not twice, f"tile {twice[:1]} is computed twice, and {missing[:1]} by nobody: {advice}")
        rows = [(p // n, p % n) for p in range(m * n)]
        require(
            found == wanted or found != rows,
            "tiles come row by row, ungrouped: programs that run at once share a row of a, and need all of b",
        )
        first = next((p for p, pair in enumerate(zip(found, wanted, strict=True)) if pair[0] != pair[1]), 0)
        require(
            found == wanted,
            f"pid {first} has tile {found[first]}, expected {wanted[first]}: bands of GROUP rows, by columns in each",
        )


@on_ranks(1)
def test_matmul_kernel(answer: Answer, group: WatchedGroup) -> None:
    single, half = torch.float32, torch.float16
    # M, N, K, dtype of a and b, of c, which of a and b lies transposed
    for M, N, K, dtype, stored, turned in (
        (17, 5, 9, single, single, "a"),
        (20, 33, 40, half, single, "b"),
        (32, 32, 32, single, single, ""),
        (16, 16, 80, half, single, ""),
        (16, 16, 96, half, half, ""),
        (3, 4, 0, single, single, ""),
    ):
        tiles = {"BM": 16, "BN": 32, "BK": 16}
        types = f"{str(dtype)[6:]}, c {str(stored)[6:]}"
        case(f"[{M}, {K}] x [{K}, {N}] {types}, {turned or 'nothing'} transposed, {tiles}")
        torch.manual_seed(M)
        a, b = torch.randn(M, K), torch.randn(K, N)
        if K == 80:
            a, b = torch.full((M, K), 32.0), torch.full((K, N), 32.0)  # sums to 81,920: infinite in fp16
        if K == 96:
            a, b = torch.full((M, K), 40.0), torch.full((K, N), 40.0)
            b[48:] = -20.0  # of c: 76,800 on the way, 38,400 in the end
        a, b = a.to(dtype), b.to(dtype)
        a = within(a.t()).t() if turned == "a" else within(a)
        b = within(b.t()).t() if turned == "b" else within(b)
        width = N + 3 * (K == 40)  # from a row of c to the next
        c = within(torch.full((M, N), float("nan"), dtype=stored), width)
        grid = (-(-M // tiles["BM"]), -(-N // tiles["BN"]))
        with untouched(a_ptr=a, b_ptr=b):
            found = launch(answer.matmul_kernel, grid, a, b, c, M, N, K, *a.stride(), *b.stride(), width, **tiles)
        wanted = a.double() @ b.double()
        few = "c has no more than fp16's 11 bits: the sum over K is kept in fp16, and overflows at 65,504"
        narrow = stored != half and torch.equal(c, c.half().float()) and not torch.equal(wanted, wanted.half().double())
        require(dtype != half or not narrow, few)
        kept = "c is infinite: the sum over K is kept in c's fp16; on the way it is 76,800, in the end 38,400"
        require(stored != half or not c.isinf().any(), kept)
        full, last = K // tiles["BK"] * tiles["BK"], max(K - 1, 0) // tiles["BK"] * tiles["BK"]
        known = {
            "the strides of a or b are not used: one of them lies transposed": _ignoring_strides(a, b),
            "the last step over K, which is not full, is left out": (a[:, :full].double() @ b[:full].double()).float(),
            "the last step over K alone: add the products up": (a[:, last:].double() @ b[last:].double()).float(),
        }
        bound = 4e-7 * (K + 1) * float((a.double().abs() @ b.double().abs()).max() + 1)
        equal(c.float(), wanted.to(stored).float(), "c", known=known, rtol=1e-6, atol=min(bound, 2e-4))
        advice = f"a tile of a serves {tiles['BN']} columns, a tile of b {tiles['BM']} rows"
        moved(found, times(bytes_of(a=a, b=b), a=grid[1], b=grid[0]), bytes_of(c=c), advice=advice)
        steps = grid[0] * grid[1] * -(-K // tiles["BK"])
        if K:
            multiplied(found, steps * 2 * math.prod(tiles.values()), "a product of tiles for every step over K")
        no_larger(found, 32 * 16, "tiles are BM x BK, BK x BN and BM x BN")


def _ignoring_strides(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The product of what lies in memory, read row by row."""
    flat = [t.t().reshape(t.shape) if t.stride(0) < t.stride(1) else t for t in (a, b)]
    return (flat[0].double() @ flat[1].double()).float()


@on_ranks(1)
def test_flash_kernel(answer: Answer, group: WatchedGroup) -> None:
    # T, heads, group, D, BM, BN, dtype, heads of all tokens side by side
    for T, heads, share, D, BM, BN, dtype, beside in (
        (48, 2, 1, 16, 16, 16, torch.float32, False),
        (37, 4, 2, 16, 32, 16, torch.float16, True),
        (21, 1, 1, 32, 16, 32, torch.float32, False),
        (1, 2, 1, 16, 16, 16, torch.float32, True),
    ):
        case(f"{T} tokens, {heads} heads, {heads // share} of keys, D = {D}, BM = {BM}, BN = {BN}, {str(dtype)[6:]}")
        torch.manual_seed(T)
        q, k, v = (torch.randn(h, T, D).to(dtype) for h in (heads, heads // share, heads // share))
        k = k + (torch.arange(T) > 20).to(dtype)[:, None] * 8  # later keys have larger scores: the maximum grows
        q[0, :, 0] *= 30  # exp of its scores overflows
        k[..., 1], q[0, min(5, T - 1)] = 40, 0
        q[0, min(5, T - 1), 1] = -1500  # all scores of this query are -15,000: what hides a key must be lower
        if dtype == torch.float16:  # all keys alike: before it is divided, the result exceeds 65,504
            q[1], v[0] = 0, v[0] + 2500
        q, k, v = _laid(q, beside), *(_laid(t, beside, room=3) for t in (k, v))
        out, lse = (
            within(torch.full((heads, T, D), float("nan"), dtype=dtype)),
            within(torch.full((heads, T), float("nan"))),
        )
        grid, scale = (-(-T // BM), heads), {21: 1.5, 37: 1.1}.get(T, 1) / math.sqrt(D)
        with untouched(q_ptr=q, k_ptr=k, v_ptr=v):
            c = launch(
                answer.flash_kernel, grid, q, k, v, out, lse, T, share, scale,
                q.stride(0), q.stride(1), k.stride(0), k.stride(1), D=D, BM=BM, BN=BN,
            )  # fmt: skip
        _compare(q, k, v, out, lse, share, scale, BM, BN)
        _costs(c, q, k, out, lse, T, heads, D, BM, BN)


def _laid(t: torch.Tensor, beside: bool, room: int = 0) -> torch.Tensor:
    """A view of [T, heads, D], as a model's projection leaves it; else of [heads, T + room, D], as a cache has it."""
    if beside:
        return within(t.transpose(0, 1).contiguous()).transpose(0, 1)
    return within(torch.nn.functional.pad(t, (0, 0, 0, room), value=math.nan))[:, : t.shape[1]]


def _compare(q: Any, k: Any, v: Any, out: Any, lse: Any, share: int, scale: float, BM: int, BN: int) -> None:
    def attention(
        causal: bool = True, scale: float = scale, reads: list[int] | None = None, first: int = 1,
        largest: bool = False, step: int = 1, hidden: float = -math.inf, q: Any = q,
    ) -> tuple[Any, Any]:  # fmt: skip
        """reads: the key head of each query head. `first`: the first key that is hidden, from the query's own on.
        largest: the largest score, not lse. step: so many keys are hidden together, or seen. hidden: what hides them,
        in blocks up to the diagonal.
        """
        keys = [t.double() for t in (k, v)]
        heads = [t[reads] if reads else t.repeat_interleave(share, 0) for t in keys]
        scores = q.double() @ heads[0].transpose(1, 2) * scale
        if causal:
            token = torch.arange(scores.shape[-1])
            later = token // step * step >= token[:, None] + first
            scores = scores.masked_fill(later, hidden)
            scores = scores.masked_fill(token >= (token[:, None] // BM + 1) * BM, -math.inf)
        sums = scores.amax(-1) if largest else scores.logsumexp(-1)
        return (scores.softmax(-1) @ heads[1]).to(out.dtype), sums

    bound = {"rtol": 2e-3, "atol": 5e-4} if out.dtype == torch.float16 else {"rtol": 1e-4, "atol": 2e-5}
    (wanted, sums), largest = attention(), attention(largest=True)[1]
    known = {
        said: _slipped(q, k, v, share, scale, BN, slip).to(out.dtype)
        for slip, said in (
            ("result", "the result so far is not rescaled when the maximum grows"),
            ("sum", "the sum so far is not rescaled when the maximum grows"),
            ("divided", "divided by the sum so far in each block: divide the result once, at the end"),
            ("undivided", "the result is not divided by the sum, at the end"),
        )
    } | {
        "not causal: a query sees keys that come after it": attention(causal=False)[0],
        "a query sees its own key too: keys after it are hidden": attention(first=0)[0],
        "whole blocks of keys are hidden, and keys in the last one are not": attention(step=BN)[0],
        "a number hides keys, and a query has scores below it: hide them by -inf": attention(hidden=-1e4)[0],
        "scale is not applied to the scores": attention(scale=1.0)[0],
        "scale is an argument, and need not be 1 / sqrt(D)": attention(scale=q.shape[-1] ** -0.5)[0],
        "exp2 is 2 to the power: scores times log2(e) first, or exp": attention(scale=scale * math.log(2))[0],
        "query head h must read key head h // group, not h % group": attention(
            reads=[min(h % share, len(k) - 1) for h in range(len(q))]
        )[0],
        "query head h must read key head h // group, not h % (number of key heads)": attention(
            reads=[h % len(k) for h in range(len(q))]
        )[0],
    }
    require(
        out.isfinite().all() or not wanted.isfinite().all() or out.dtype != torch.float16,
        "out is infinite or NaN: is the running result, not yet divided by the sum, kept in fp16?",
    )
    larger = "subtract the maximum so far, the larger of the last one and the block's own"
    require(not (lse == math.inf).any(), f"lse is infinite: an exponential overflows; {larger}")
    equal(out, wanted, "out", known=known, **bound)
    lse_known = {
        "lse is the logarithm to base 2, natural is expected": sums / math.log(2),
        "it is rounded to 16 bits: lse is fp32": sums.half(),
        "q is scaled in 16 bits: scale the scores, which are fp32": attention(
            scale=1.0, q=q * torch.tensor(scale, dtype=q.dtype)
        )[1],
        "the maximum was subtracted from the scores, and is missing in lse": sums - largest,
        "the logarithm of the sum is missing: lse is the maximum + log(sum)": largest + (sums - largest).exp(),
    }
    equal(lse, sums.float(), "lse", known=lse_known, rtol=1e-5, atol=1e-4)


def _slipped(q: Any, k: Any, v: Any, share: int, scale: float, BN: int, slip: str) -> torch.Tensor:
    """Attention block by block, in which `result` or `sum` keeps its scale when the maximum grows, the weights are
    `divided` by the sum so far in each block, or nothing is divided at all.
    """
    T = q.shape[1]
    keys, values = (t.double().repeat_interleave(share, 0) for t in (k, v))
    later = torch.ones(T, T, dtype=torch.bool).triu(1)
    scores = (q.double() @ keys.transpose(1, 2) * scale).masked_fill(later, -math.inf)
    top, total, result = scores[..., :1] - math.inf, torch.zeros(()), torch.zeros(())
    for part, rows in zip(scores.split(BN, -1), values.split(BN, 1), strict=True):
        new = torch.maximum(top, part.amax(-1, True))
        weights, shrink = (part - new).exp(), (top - new).exp()
        total, top = total * (1 if slip == "sum" else shrink) + weights.sum(-1, True), new
        weights = weights / total if slip == "divided" else weights
        result = result * (1 if slip == "result" else shrink) + weights @ rows
    return result / total if slip in ("result", "sum") else result


def _costs(c: Any, q: Any, k: Any, out: Any, lse: Any, T: int, heads: int, D: int, BM: int, BN: int) -> None:
    """Keys and values up to the diagonal alone, and once; two products a block; no block of T."""
    ends = [-(-min(first + BM, T) // BN) for first in range(0, T, BM)]  # blocks of keys that each program needs
    blocks, every = heads * sum(ends), heads * len(ends) * -(-T // BN)
    size = D * k.element_size()
    most = heads * sum(min(end * BN, T) for end in ends) * size
    least = heads * sum(min(first + BM, T) for first in range(0, T, BM)) * size
    require(
        blocks == every or c.loaded_from["k_ptr"] != heads * len(ends) * T * size or c.flops < every * 4 * BM * BN * D,
        f"all {every} blocks are computed, {blocks} have a key that a query may see: end the loop at the diagonal",
    )
    largest = max(BM * BN, BM * D, BN * D)
    no_larger(c, largest, "blocks are BM or BN by BM, BN or D, and whole rows of scores are not")
    advice = "one pass over keys and values, with a running maximum, sum and result"
    moved(
        c,
        {**bytes_of(q=q), "k_ptr": least, "v_ptr": least},
        bytes_of(out=out, lse=lse),
        optional={"k_ptr": most - least, "v_ptr": most - least},
        advice=advice,
    )
    multiplied(c, blocks * 4 * BM * BN * D, "scores once and values once for each block up to the diagonal")
