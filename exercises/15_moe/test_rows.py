"""Grades chapter 15's rows: tokens laid out by expert, sent to the ranks that have them, brought back, added up."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from refimpl.grading.compare import Wrong, equal, require, rounded_once
from refimpl.grading.exchange import DTYPES, attached, numbers
from refimpl.grading.grade import on_ranks
from refimpl.grading.memory import Kept, Largest, let_go, untouched
from refimpl.grading.rank import Answer, case
from refimpl.grading.traffic import WatchedGroup, same_traffic

M = 8
CHOICES = {
    "the example": ([[1, 0], [1, -1]], 2),
    "an expert that gets nothing, one that gets all": ([[2, 0], [2, 3], [2, 0], [2, 3], [2, 0]], 4),
    "dropped ones between": ([[1, 0], [-1, -1], [-1, 2], [0, -1], [2, 1], [0, 1]], 3),
    "one choice": ([[3], [0], [3], [3], [-1], [0]], 4),
    "everything dropped": ([[-1, -1], [-1, -1]], 2),
    "no token": ([], 3),
}


def several(found: Any, names: str) -> Sequence[Tensor]:
    number = names.count(",") + 1
    require(isinstance(found, tuple) and len(found) == number, f"the result is no tuple of {number}: ({names})")
    result: Sequence[Tensor] = found
    return result


def drawn(tokens: int, number: int, k: int) -> list[list[int]]:
    choices = torch.rand(tokens, number, generator=torch.Generator().manual_seed(2)).argsort(1)[:, :k]
    choices[3, 1] = choices[7, 0] = -1
    found: list[list[int]] = choices.tolist()
    return found


def routes_of(experts: Tensor, number: int) -> list[int]:
    flat = experts.flatten().tolist()
    return [r for e in range(number) for r, expert in enumerate(flat) if expert == e]


@on_ranks(1)
def test_permute(answer: Answer, group: WatchedGroup) -> None:
    for name, (choices, number) in {**CHOICES, "40 tokens": (drawn(40, 8, 3), 8)}.items():
        for dtype in (*DTYPES, torch.float64):
            case(f"{name}: {len(choices)} tokens, {number} experts, {dtype}")
            experts = torch.tensor(choices, dtype=torch.int64).view(len(choices), -1 if choices else 2)
            tokens, k = experts.shape
            x = (numbers(tokens, M, seed=1, dtype=dtype) / 3).requires_grad_()  # thirds, which no smaller dtype holds
            with untouched(x=x, experts=experts), Largest() as largest:
                rows, routes, counts = several(answer.permute(x, experts, number), "rows, routes, counts")
            expected = torch.tensor(routes_of(experts, number), dtype=torch.int64)
            judge_routes(routes, expected, experts)
            equal(rows, x.detach()[expected // k], "the rows", rtol=0, atol=0)
            kept = experts[experts >= 0].bincount(minlength=number)
            shorter = experts[experts >= 0].bincount()
            equal(counts, kept, "the counts", known={"experts that got nothing are missing": shorter})
            room = max(rows.numel(), tokens * k * number, x.numel(), 64)
            require(
                largest.numel <= room,
                f"something of {largest.numel:,} elements is made; the rows are {rows.numel():,}, k T x E are "
                f"{tokens * k * number:,}: rows are laid out by their numbers, not by one-hot matrices",
            )
            if not len(expected):
                continue
            slope = numbers(*rows.shape, seed=2, dtype=dtype)
            attached(rows, "the rows").backward(slope)
            truth = torch.zeros(tokens, M).index_add(0, expected // k, slope.float()).to(dtype)
            one = torch.zeros(tokens, M).index_copy(0, expected // k, slope.float()).to(dtype)
            known = {"of one of its rows alone: a token's gradient is the sum over its rows": one}
            equal(x.grad, truth, "the gradient of x", known={s: t for s, t in known.items() if not t.equal(truth)})


def judge_routes(found: Any, expected: Tensor, experts: Tensor) -> None:
    flat = experts.flatten()
    fits = isinstance(found, Tensor) and found.shape == expected.shape and found.dtype == torch.int64
    if fits and len(found) and int(found.min()) >= 0 and int(found.max()) < len(flat):
        # Asked of what is laid out by expert, but not in order, or not by expert at all.
        sorted_same = torch.equal(flat[found], flat[expected]) and not torch.equal(found, expected)
        details = [f"  expected {expected.tolist()[:12]}", f"  found    {found.tolist()[:12]}"]
        require(not sorted_same, "an expert's rows are not in the order of their routes: is the sort stable?", *details)
    known = {
        "the number of the token, not of the route t k + j": expected // experts.shape[1],
        "in the order of the tokens: an expert's rows must lie together": expected.sort().values,
    }
    equal(found, expected, "the routes", known={s: t for s, t in known.items() if not t.equal(expected)})


@on_ranks(1)
def test_combine(answer: Answer, group: WatchedGroup) -> None:
    for name, (choices, number) in {**CHOICES, "40 tokens": (drawn(40, 8, 3), 8)}.items():
        for dtype in DTYPES:
            case(f"{name}: {len(choices)} tokens, {number} experts, {dtype}")
            experts = torch.tensor(choices, dtype=torch.int64).view(len(choices), -1 if choices else 2)
            judge_combined(answer, experts, torch.tensor(routes_of(experts, number), dtype=torch.int64), dtype)
    case("bf16 answers, weights that bf16 has not")
    chance = torch.Generator().manual_seed(6)
    answers, weights = torch.randn(200, M, generator=chance).bfloat16(), torch.rand(100, 2, generator=chance)
    found = answer.combine(answers, torch.arange(200), weights)
    exact = (answers.double().view(100, 2, M) * weights.double()[:, :, None]).sum(1)
    require(isinstance(found, Tensor) and found.shape == exact.shape, "the sum is no tensor [T, M]")
    rounded_once(found, exact, "the sum", "weigh and add in fp32, round at the end", atol=1e-5)


def judge_combined(answer: Answer, experts: Tensor, routes: Tensor, dtype: torch.dtype) -> None:
    tokens, k = experts.shape
    answers = numbers(len(routes), M, seed=3, dtype=dtype).requires_grad_()
    weights = (numbers(tokens, k, seed=4) / 8 + 0.5).requires_grad_()
    y, w = answers.detach().clone().requires_grad_(), weights.detach().clone().requires_grad_()
    with untouched(answers=answers, weights=weights, routes=routes), Largest() as largest:
        found = answer.combine(answers, routes, weights)
    rows = y.float() * w.flatten()[routes, None]
    truth = torch.zeros(tokens, M).index_add(0, routes // k, rows).to(dtype)
    bare = torch.zeros(tokens, M).index_add(0, routes // k, y.detach().float()).to(dtype)
    wrong, last, first = (torch.zeros(tokens, M) for _ in range(3))
    for row, token in zip(rows.detach(), (routes // k).tolist(), strict=True):
        last[token] = row
    first.index_add_(0, routes // k, y.detach().float() * w.detach()[routes // k, :1])
    left = torch.zeros(tokens).index_add(0, routes // k, w.detach().flatten()[routes])
    if len(routes):
        row_weights = torch.cat([w.detach().flatten()] * 2)[: len(routes), None]
        wrong.index_add_(0, routes // k, y.detach().float() * row_weights)
    known = {
        "not weighted": bare,
        "weighted in the order of the rows: row r has the weight of route routes[r]": wrong.to(dtype),
        "a token's rows all have the weight of its first route": first.to(dtype),
        "the last row of a token overwrites the others: add them": last.to(dtype),
        "divided by the weights that are left: what is dropped takes its share with it": (
            truth.detach().float() / left.where(left > 0, 1)[:, None]
        ).to(dtype),
        "the mean over a token's k routes: the weights have divided already": (truth.detach().float() / k).to(dtype),
    }
    equal(found, truth.detach(), "the sum", known={s: t for s, t in known.items() if not t.equal(truth.detach())})
    room = max(answers.numel(), tokens * M, 64)
    made = (
        f"something of {largest.numel:,} elements is made; the answers have {answers.numel():,}, the result "
        f"{tokens * M:,}: add each row to its token, without one-hot matrices or rows for what was dropped"
    )
    require(largest.numel <= room, made)
    if not len(routes):
        loose = "no row came, and the sum hangs on no answer: other ranks wait in backward for this one's exchange"
        require(found.requires_grad, loose)
        found.sum().backward()
        require(answers.grad is not None, loose)
        return
    slope = numbers(tokens, M, seed=5, dtype=dtype)
    attached(found, "the sum").backward(slope)
    truth.backward(slope)
    assert y.grad is not None
    assert w.grad is not None
    require(answers.grad is not None, "the answers have no gradient")
    require(weights.grad is not None, "the weights have no gradient: the gate learns through them")
    rtol = 1e-2 if dtype == torch.bfloat16 else 1e-5
    unweighted = {"not multiplied by the weight": slope[routes // k]}
    equal(answers.grad, y.grad, "the gradient of the answers", known=unweighted, rtol=rtol)
    equal(weights.grad, w.grad, "the gradient of the weights", rtol=rtol)


def everyones(kind: str, ranks: int) -> tuple[list[Tensor], list[Tensor]]:
    """Counts [E] of every rank, and as many rows: what `permute` gives on each."""
    chance, number = torch.Generator().manual_seed(7), ranks * (1 if kind == "one expert a rank" else 2)
    counts = [torch.randint(0, 5, (number,), generator=chance) for _ in range(ranks)]
    if kind == "all to one expert":
        counts = [torch.zeros_like(c).index_fill_(0, torch.tensor(1), 3 + r) for r, c in enumerate(counts)]
    if kind == "an expert gets nothing, a rank has no tokens":
        for c in counts:
            c[-1] = 0
        counts[-1].zero_()
        counts[0][0] = 2
    if kind == "a rank's experts get nothing":
        for c in counts:
            c[:2] = 0
    if kind == "no tokens anywhere":
        counts = [torch.zeros_like(c) for c in counts]
    return counts, [numbers(int(c.sum()), M, seed=20 + r) for r, c in enumerate(counts)]


KINDS = (
    "two experts a rank", "one expert a rank", "all to one expert", "an expert gets nothing, a rank has no tokens",
    "a rank's experts get nothing", "no tokens anywhere",
)  # fmt: skip


def exchanged(parts: list[Tensor], counts: list[Tensor], rank: int) -> Tensor:
    """Of every rank's rows those for this rank's experts, rank after rank."""
    ranks = len(counts)
    each = [part.split(c.view(ranks, -1).sum(1).tolist()) for part, c in zip(parts, counts, strict=True)]
    return torch.cat([pieces[rank] for pieces in each])


def as_traffic(group: WatchedGroup, counts: list[Tensor], dtype: torch.dtype, back: bool, with_counts: bool) -> Any:
    """What one such exchange sends."""
    oracle = group.oracle()
    if with_counts:
        mine = counts[group.rank]
        oracle.all_to_all(torch.empty_like(mine), mine)
    out_of = counts[group.rank].view(group.size, -1).sum(1).tolist()
    into = [int(c.view(group.size, -1)[group.rank].sum()) for c in counts]
    if back:
        out_of, into = into, out_of
    x, out = torch.zeros(sum(out_of), M, dtype=dtype), torch.zeros(sum(into), M, dtype=dtype)
    oracle.all_to_all(out, x, out_splits=into, in_splits=out_of)
    return oracle


def judge_sent(group: WatchedGroup, oracle: WatchedGroup, what: str, itemsize: int) -> None:
    """As same_traffic, but says first what sending everything everywhere looks like."""
    found, expected = group.ledger.sent_bytes(), oracle.ledger.sent_bytes()
    everywhere = [op for op in ("all_gather", "broadcast", "all_reduce") if found.get(op)]
    if everywhere:
        headline = f"{what} calls {', '.join(everywhere)}, which goes to ranks that have not got the expert too"
        bytes_ = f"{sum(found.values()):,} bytes leave this rank, expected {sum(expected.values()):,}"
        raise Wrong(f"{headline}: {bytes_}, by all_to_all alone")
    same_traffic(group, oracle, what, itemsize=itemsize)
    group.ledger.reset()


@on_ranks(2, 3, 4)
def test_dispatch(answer: Answer, group: WatchedGroup) -> None:
    for kind in KINDS:
        for dtype in DTYPES[: 2 if kind == KINDS[0] else 1]:
            counts, parts = everyones(kind, group.size)
            case(f"{kind}, {dtype}; this rank's counts {counts[group.rank].tolist()}")
            judge_dispatch(answer, group.fresh(), counts, [part.to(dtype) for part in parts])


def judge_dispatch(answer: Answer, group: WatchedGroup, counts: list[Tensor], parts: list[Tensor]) -> None:
    rank, dtype = group.rank, parts[0].dtype
    rows = parts[rank].mT.contiguous().mT.requires_grad_()
    mine, expected = counts[rank].clone(), exchanged(parts, counts, rank)
    kept = Kept(group)
    given = rows * 1  # which nobody keeps but the answer
    with untouched(rows=given, counts=mine):
        arrived, sizes = several(answer.dispatch(given, mine, group), "arrived, sizes")
    del given
    room = expected.nbytes + 8 * len(mine)
    kept.judge(room, "dispatch", "the rows that arrived alone may stay, backward needs nothing of them")
    away = (
        "dispatch returns without a collective on a rank that has no rows: the others wait for its part of the exchange"
    )
    require(group.ledger.events or len(rows), away)
    whole = torch.stack([c.view(group.size, -1)[rank] for c in counts])
    turned = {"[E/N, N]: rank s is row s": whole.t()}
    equal(sizes, whole, "sizes", known={s: t for s, t in turned.items() if not t.equal(whole)})
    by_expert = by_experts(expected, whole)
    everything = torch.cat(parts)
    known = {"they lie by expert: rank 0's rows for all of this rank's experts come first": by_expert}
    if len(everything) != len(expected):
        known["every rank's rows, whoever's their expert is"] = everything
    equal(arrived, expected, "the rows that arrived", known={s: t for s, t in known.items() if not t.equal(expected)})
    oracle = as_traffic(group, counts, dtype, back=False, with_counts=True)
    judge_sent(group, oracle, "dispatch", dtype.itemsize)
    slopes = [numbers(*part.shape, seed=40 + r, dtype=dtype) for r, part in enumerate(parts)]
    arriving, held = exchanged(slopes, counts, rank).mT.contiguous().mT, [attached(arrived, "what arrived")]
    del arrived
    with untouched(the_gradient_that_arrives=arriving):
        torch.autograd.backward(let_go(held, "what arrived"), arriving)
    equal(rows.grad, slopes[rank], "the gradient of the rows", ranks=group.size)
    oracle = as_traffic(group, counts, dtype, back=True, with_counts=False)
    judge_sent(group, oracle, "backward of dispatch", dtype.itemsize)


def by_experts(x: Tensor, sizes: Tensor) -> Tensor:
    """Rows by (source, expert) -> by (expert, source)."""
    blocks, number = x.split(sizes.flatten().tolist()), sizes.shape[1]  # type: ignore[no-untyped-call]
    return torch.cat([block for e in range(number) for block in blocks[e::number]])


@on_ranks(2, 3, 4)
def test_give_back(answer: Answer, group: WatchedGroup) -> None:
    for kind in KINDS:
        for dtype in DTYPES[: 2 if kind == KINDS[0] else 1]:
            counts, parts = everyones(kind, group.size)
            case(f"{kind}, {dtype}; this rank's counts {counts[group.rank].tolist()}")
            judge_given_back(answer, group.fresh(), counts, [part.to(dtype) for part in parts])


def judge_given_back(answer: Answer, group: WatchedGroup, counts: list[Tensor], parts: list[Tensor]) -> None:
    rank, dtype, mine = group.rank, parts[0].dtype, counts[group.rank].clone()
    answers = exchanged(parts, counts, rank).mT.contiguous().mT.requires_grad_()
    sizes = torch.stack([c.view(group.size, -1)[rank] for c in counts])
    kept = Kept(group)
    given = answers * 1
    with untouched(answers=given, counts=mine, sizes=sizes):
        found = answer.give_back(given, mine, sizes, group)
    del given
    kept.judge(parts[rank].nbytes, "give_back", "the rows that came back alone may stay, backward needs no answers")
    equal(found, parts[rank], "the rows that came back")
    judge_sent(group, as_traffic(group, counts, dtype, back=True, with_counts=False), "give_back", dtype.itemsize)
    slopes = [numbers(*part.shape, seed=60 + r, dtype=dtype) for r, part in enumerate(parts)]
    arriving, held = slopes[rank].mT.contiguous().mT, [attached(found, "what came back")]
    del found
    with untouched(the_gradient_that_arrives=arriving):
        torch.autograd.backward(let_go(held, "what came back"), arriving)
    equal(answers.grad, exchanged(slopes, counts, rank), "the gradient of the answers", ranks=group.size)
    oracle = as_traffic(group, counts, dtype, back=False, with_counts=False)
    judge_sent(group, oracle, "backward of give_back", dtype.itemsize)
