"""Grades chapter 13's ring: attention over all ranks' tokens, bytes sent, and what a rank holds at a time."""

import math
from typing import Any

import torch
from torch import Tensor

from refimpl.grading.compare import Wrong, equal, require
from refimpl.grading.grade import on_ranks
from refimpl.grading.memory import Kept, Largest, untouched
from refimpl.grading.rank import Answer, case
from refimpl.grading.traffic import WatchedGroup, all_done, same_traffic, starts

INF = math.inf


def attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """In fp64, in one piece; rows that see nothing are 0."""
    scores = (q.double() @ k.double().mT * q.shape[-1] ** -0.5).masked_fill(~seen, -INF)
    return scores.softmax(-1).nan_to_num(0.0) @ v.double()


def stale(q: Tensor, k: Tensor, v: Tensor, positions: list[Tensor], rank: int) -> Tensor:
    """The running softmax whose outputs stay in units of the largest score of their time."""
    ranks, here = len(positions), positions[rank][:, None]
    top, out, total = torch.full(q.shape[1:3], -INF).double(), torch.zeros(q.shape[1:]).double(), torch.zeros(())
    for hop in range(ranks):
        source = (rank - hop) % ranks
        seen = (positions[source] >= 0) & (positions[source] <= here)
        scores = (q[rank].double() @ k[source].double().mT * q.shape[-1] ** -0.5).masked_fill(~seen, -INF)
        largest = torch.maximum(top, scores.amax(-1))
        weights = (scores - largest[..., None]).exp().nan_to_num(0.0)
        out, total = out + weights @ v[source].double(), total * (top - largest).exp().nan_to_num(0.0) + weights.sum(-1)
        top = largest
    return (out / total.clamp(min=1e-300)[..., None]).to(q.dtype)


class LooksWithin(WatchedGroup):
    """Weighs what is alive whenever a transfer begins."""

    kept: Kept
    room = 0

    def _run(self, op: str, *rest: Any, **options: Any) -> Any:
        self.kept.judge(self.room, "during its hops ring_attention", "one other rank's keys and values at a time")
        return super()._run(op, *rest, **options)


CASES = {  # heads, tokens a rank, width, order, scale, dtype
    "runs": (2, 3, 4, "runs", 1.0, torch.float32),
    "zigzag, large scores": (1, 4, 8, "zigzag", 200.0, torch.float32),
    "bf16, zigzag": (2, 6, 8, "zigzag", 3.0, torch.bfloat16),
    "any order; all tokens of the last rank are padding, and one of the first": (2, 4, 4, "any", 1.0, torch.float32),
    "40 tokens a rank, width 4": (2, 40, 4, "zigzag", 1.0, torch.float32),
    "4 tokens a rank, width 256": (2, 4, 256, "zigzag", 1.0, torch.float32),
}


def orders(order: str, size: int, ranks: int) -> list[Tensor]:
    chunks = torch.arange(size * ranks).chunk(2 * ranks if order == "zigzag" else ranks)
    if order == "zigzag":
        return [torch.cat([chunks[r], chunks[2 * ranks - 1 - r]]) for r in range(ranks)]
    if order == "runs":
        return list(chunks)
    mixed = torch.randperm(size * (ranks - 1), generator=torch.Generator().manual_seed(3))
    mixed[1] = -1
    return [*mixed.chunk(ranks - 1), torch.full((size,), -1)]


@on_ranks(2, 3, 5)
def test_ring_attention(answer: Answer, group: WatchedGroup) -> None:
    for name, (heads, size, width, order, scale, dtype) in CASES.items():
        case(name)
        generator = torch.Generator().manual_seed(7)
        shape = (group.size, heads, size, width)
        q, k, v = (torch.randn(shape, generator=generator) for _ in range(3))
        q, k, v = ((x * s).to(dtype) for x, s in ((q, scale), (k, 1.0), (v, 1.0)))
        positions = orders(order, size, group.size)
        mine = [x[group.rank].clone() for x in (q, k, v)]
        with untouched(q=mine[0], k=mine[1], v=mine[2], positions=positions), Largest() as largest:
            watched = weighing(group, mine, width)
            found = answer.ring_attention(watched, *mine, positions)
        all_done(watched, "ring_attention")
        judge_hops(watched, 2 * mine[1].nbytes, group.size)
        judge_attended(found, q, k, v, positions, group.rank)
        oracle, out = group.oracle(), torch.empty_like(torch.stack(mine[1:]))
        for _ in range(group.size - 1):
            oracle.send_recv(out.clone(), (group.rank + 1) % group.size, out, (group.rank - 1) % group.size)
        same_traffic(watched, oracle, "ring_attention", calls=False, itemsize=dtype.itemsize)
        most = max(heads * size * size, 2 * heads * size * width, 1)
        require(
            math.prod(largest.shape) <= most,
            f"a tensor of shape {list(largest.shape)} is made: {math.prod(largest.shape):,} elements, of which "
            f"{most:,} are enough; no rank may hold the scores, or the keys, of the whole sequence at once",
        )


def judge_hops(watched: WatchedGroup, each: int, ranks: int) -> None:
    """What is wrong with the number of hops, of `each` bytes, where only sends were made."""
    sends = [e.sent_bytes for e in starts(watched.ledger) if e.op == "send"]
    if not set(watched.ledger.calls()) <= {"send", "recv"} or max(sends, default=0) > each:
        return
    most = each * (ranks - 1)
    fewer = (
        f"{sum(sends):,} bytes are passed on, expected {most:,}: a rank passes on also what it does not look at itself"
    )
    require(sum(sends) >= most, fewer)
    home = f"{ranks} hops, expected {ranks - 1}: after the last keys have been looked at nobody needs them"
    require(sum(sends) != each * ranks, home)


def weighing(group: WatchedGroup, mine: list[Tensor], width: int) -> WatchedGroup:
    """Where keys are large beside all else: a group that weighs."""
    watched = group.fresh()
    if width < 100 or group.size < 5:
        return watched
    watched.__class__ = LooksWithin
    assert isinstance(watched, LooksWithin)
    watched.room = 7 * mine[0].nbytes
    watched.kept = Kept(group)
    return watched


def judge_attended(found: Any, q: Tensor, k: Tensor, v: Tensor, positions: list[Tensor], rank: int) -> None:
    """q, k, v [N, H, S, D]: of all ranks."""
    ranks, _, size, _ = q.shape
    keys, values = (x.transpose(0, 1).flatten(1, 2) for x in (k, v))
    where = torch.cat(positions)

    def of(seen: Tensor, queries: Tensor = q[rank]) -> Tensor:
        return attention(queries, keys, values, seen).to(q.dtype)

    here = positions[rank][:, None]
    real = (where >= 0) & (here >= 0)
    own = torch.arange(len(where)) // size == rank
    assumed = torch.arange(len(where))
    other = torch.cat([positions[(2 * rank - r) % ranks] for r in range(ranks)])
    parts = [attention(q[rank], k[r], v[r], ((positions[r] >= 0) & (positions[r] <= here))) for r in range(ranks)]
    known = {
        "no causal mask: a query looks only at positions up to its own": of(real),
        "only this rank's own keys were looked at": of(real & (where <= here) & own),
        "this rank's own keys are missing": of(real & (where <= here) & ~own),
        "a query does not look at itself: keys up to *and with* its own position": of(real & (where < here)),
        "the mask takes ranks for consecutive runs of tokens: `positions` says where they stand": of(
            assumed <= assumed[own][:, None]
        ),
        "the mask takes the keys at hand for another rank's: after h hops to the right they are those of rank - h": of(
            (other >= 0) & (here >= 0) & (other <= here)
        ),
        "padding was looked at: position -1 is smaller than all, and seen by nobody": of(where <= here),
        "padding looks at keys: as a query it gives 0": of((where >= 0) & ((where <= here) | (here < 0))),
        "the mask is that of rank 0's queries: positions[group.rank] are this rank's": of(
            (where >= 0) & (where <= positions[0][:, None])
        ),
        "the parts are averaged: each weighs by its sum of exp(score)": (sum(parts) / ranks).to(q.dtype),
        "scores are divided by the root of the number of tokens, not of the width D": of(
            real & (where <= here), q[rank] * (q.shape[-1] / size) ** 0.5
        ),
        "scores are not divided by sqrt(D)": of(real & (where <= here), q[rank] * q.shape[-1] ** 0.5),
        "a larger score came, and what earlier keys gave was not scaled down with their sum": stale(
            q, k, v, positions, rank
        ),
    }
    expected = of(real & (where <= here))
    if isinstance(found, Tensor) and found.shape == expected.shape and bool(found.isnan().any()):
        rows = found.isnan().any(-1).any(0)
        sighted = (real & (where <= here)).view(size, ranks, size).any(-1).all(-1)
        overflow = "the result has NaN where a query sees keys of every rank: exp of a large score overflows"
        require(not bool((rows & sighted).any()), overflow)
        raise Wrong("the result has NaN: a query that sees none of the keys at hand, or none at all, has lse -inf")
    if q.dtype == torch.float32:
        equal(found, expected, "attention", known=known, rtol=1e-4, atol=1e-5)
        return
    known = {name: x for name, x in known.items() if not torch.allclose(x, expected, rtol=0.02, atol=0.01)}
    sums = "in bf16 it is less exact than one rounding of the result: are scores and sums fp32?"
    near = isinstance(found, Tensor) and found.shape == expected.shape and found.dtype == expected.dtype
    if near and torch.allclose(found, expected, rtol=0.1, atol=0.05):
        off = (found.double() - expected.double()).abs() > 0.0079 * expected.double().abs() + 1e-4
        require(not bool(off.any()), sums, f"  {int(off.sum())} of {off.numel()} elements")
        return
    equal(found, expected, "attention", known=known, rtol=0.0079, atol=1e-4)
