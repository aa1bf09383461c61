"""Grades chapter 01: results at 2, 3 and 4 ranks, and who sent how many bytes to whom."""

import math

import torch
from torch import Tensor

from refimpl.comm import ring
from refimpl.grading.compare import equal, require
from refimpl.grading.grade import on_ranks
from refimpl.grading.memory import Kept, own_memory, untouched
from refimpl.grading.rank import Answer, case
from refimpl.grading.traffic import WatchedGroup, all_done, one_at_a_time, same_traffic, starts

F32, BF16 = torch.float32, torch.bfloat16
OVERWRITTEN = "the next call overwrites this one's result: it must have memory of its own"
SIZES = ((5, F32), (1, F32), (3, BF16), (2, torch.int64))


def given(rank: int, n: int, dtype: torch.dtype = F32) -> Tensor:
    if dtype == F32:
        return torch.randn(n, generator=torch.Generator().manual_seed(rank)) + rank
    return ((torch.arange(n) * 5 + rank) % 11).to(dtype)  # sums of small integers are exact in any order


@on_ranks(2, 3, 4)
def test_ring_reduce_scatter(answer: Answer, group: WatchedGroup) -> None:
    for size, dtype in SIZES:
        case(f"{size} elements of {dtype} a rank")
        watched, oracle = group.fresh(), group.oracle()
        inputs = [given(r, size * group.size, dtype) for r in range(group.size)]
        x, expected = inputs[group.rank].clone(), torch.empty(size, dtype=dtype)
        ring.reduce_scatter(oracle, expected, inputs[group.rank])
        found = answer.ring_reduce_scatter(watched, x)
        total = torch.stack(inputs).sum(0)
        own = "it is your own chunk as it was: did chunk c start at rank c + 1, so that it is complete at rank c?"
        known = {own: inputs[group.rank].chunk(group.size)[group.rank]}
        known |= {
            f"it is chunk {i} of the sum, expected {group.rank}": c for i, c in enumerate(total.chunk(group.size))
        }
        known |= {"it is the whole sum, all N chunks; only this rank's is asked": total}
        equal(found, expected, "this rank's chunk", ranks=group.size, known=known)
        same = torch.equal(x, inputs[group.rank])
        require(same, "x was changed: partial sums were written into the input", f"  x is now {x.tolist()[:6]}")
        judge_ring(watched, oracle, "ring_reduce_scatter", dtype)
        own_memory(found, "the result", "return a tensor of one chunk, or a clone")
    case("200 elements of torch.float32 a rank: what stays alive")
    x = torch.ones(200 * group.size)
    watched = group.fresh()
    kept = Kept(watched)
    found = answer.ring_reduce_scatter(watched, x)
    kept.judge(found.nbytes, "ring_reduce_scatter", "the result alone may stay; where is what has arrived?")
    before = found.clone()
    answer.ring_reduce_scatter(group.fresh(), 2 * x)
    require(torch.equal(found, before), OVERWRITTEN)


@on_ranks(2, 3, 4)
def test_ring_all_gather(answer: Answer, group: WatchedGroup) -> None:
    for size, dtype in SIZES:
        case(f"{size} elements of {dtype} a rank")
        watched, oracle = group.fresh(), group.oracle()
        inputs = [given(r, size, dtype) for r in range(group.size)]
        x, expected = inputs[group.rank].clone(), torch.empty(size * group.size, dtype=dtype)
        ring.all_gather(oracle, expected, x)
        with untouched(x=x):
            found = answer.ring_all_gather(watched, x)
        arrival = [inputs[(group.rank - i) % group.size] for i in range(group.size)]
        known = {
            "the chunks are in the order of arrival, not in rank order": torch.cat(arrival),
            "the chunks are in the reverse order": torch.cat(inputs[::-1]),
            "every chunk is your own": x.repeat(group.size),
            "all others are the left neighbour's: send on what has just arrived, not your own again": torch.cat(
                [x if r == group.rank else inputs[group.rank - 1] for r in range(group.size)]
            ),
            "all others are the one that came last: each needs memory of its own": torch.cat(
                [x if r == group.rank else arrival[-1] for r in range(group.size)]
            ),
        }
        equal(found, expected, "the gathered tensor", known=known)
        judge_ring(watched, oracle, "ring_all_gather", dtype)
        own_memory(found, "the result", "make it N chunks long, and no longer")
        before = found.clone()
    answer.ring_all_gather(group.fresh(), 2 * x + 1)
    require(torch.equal(found, before), OVERWRITTEN)


@on_ranks(2, 3, 4, 5)
def test_ring_all_reduce(answer: Answer, group: WatchedGroup) -> None:
    more = 2 * group.size
    for n, dtype in ((2 * more, F32), (2 * more + 1, F32), (group.size - 1, F32), (more - 1, BF16), (1, torch.int64)):
        case(f"{n} elements of {dtype}")
        watched = group.fresh()
        inputs = [given(r, n, dtype) for r in range(group.size)]
        x, expected = inputs[group.rank].clone(), torch.stack(inputs).sum(0)
        place = x.data_ptr()
        answer.ring_all_reduce(watched, x)
        whole = n // group.size * group.size
        known = {
            "x is unchanged: the sum must be written into it": inputs[group.rank],
            "the elements behind the last whole chunk are not summed": torch.cat(
                [expected[:whole], inputs[group.rank][whole:]]
            ),
        }
        equal(x, expected, "x after the call", ranks=group.size, known=known)
        to_the_right(watched)
        messages = 2 * (group.size - 1)
        calls, sent = watched.ledger.calls(), watched.ledger.sent_bytes()
        most = messages * math.ceil(n / group.size) * x.element_size()
        if calls != {"send": messages, "recv": messages} or sent["send"] > most:
            oracle = group.oracle()
            ring.all_reduce(oracle, x.clone())
            same_traffic(watched, oracle, "ring_all_reduce", itemsize=dtype.itemsize)
        together, enough = sum(group.everyone(sent["send"])), messages * n * x.element_size()
        padded = f"all ranks together send {together} bytes, and {enough} are enough: is x padded? Cut it unevenly"
        require(together == enough, padded, *watched.transcript())
        each = {e.sent_bytes // x.element_size() for e in starts(watched.ledger, "send")}
        even = f"messages of {sorted(each)} elements, expected {n}/{group.size} rounded up or down: cut evenly"
        require(each <= {n // group.size, -(-n // group.size)}, even, *watched.transcript())
        one_at_a_time(watched, "ring_all_reduce")
        all_done(watched, "ring_all_reduce")
        require(x.data_ptr() == place, "x has new memory: write into the old, of which others may hold views")
        for rank, other in enumerate(group.everyone(x)):
            require(
                torch.equal(x, other), f"the last bits differ from those of rank {rank}: add each chunk once, then copy"
            )


@on_ranks(1)
def test_fit_alpha_beta(answer: Answer, group: WatchedGroup) -> None:
    noise = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for sizes, alpha, beta, shake in (
        ([0, 1e6, 2e6], 1e-4, 2e-10, 0.0),
        ([1e3, 1e4, 1e5, 1e6, 1e7, 1e9], 5e-5, 1e-9, 0.0),
        ([1e3, 2e3, 4e3, 8e3, 1.6e4, 3.2e4], 1e-3, 1e-7, 1e-4),
        ([8e3, 1e3, 3.2e4, 3.2e4, 2e3, 9e3], 1e-3, 1e-7, 1e-4),  # in no order, and one of them twice
        ([1e3, 2e3, 4e3], -1e-5, 1e-7, 0.0),  # as a line through noisy measurements may have it
    ):
        case(f"{len(sizes)} sizes, alpha {alpha:g}, beta {beta:g}" + (", with noise" if shake else ""))
        n = torch.tensor(sizes, dtype=torch.float64)
        t = alpha + beta * n + shake * noise[: len(sizes)]
        scaled = torch.stack([torch.ones_like(n), n / n.max()], 1)
        best = torch.linalg.lstsq(scaled, t).solution / torch.tensor([1, n.max()])
        seconds = t.tolist()
        with untouched(sizes=sizes, seconds=seconds):
            found = answer.fit_alpha_beta(sizes, seconds)
        require(isinstance(found, tuple) and len(found) == 2, f"the result is {found!r}, expected (alpha, beta)")
        slope = float((n * t).sum() / (n * n).sum())
        ends = float((t[-1] - t[0]) / (n[-1] - n[0]))
        for name, mine, theirs in (("beta", found[1], best[1]), ("alpha", found[0], best[0])):
            weights = 1 / t.abs()
            relative = torch.linalg.lstsq(scaled * weights[:, None], t * weights).solution / torch.tensor([1, n.max()])
            rounded = not shake and math.isclose(found[1], best[1], rel_tol=1e-2)
            known = {
                "it is the other one: return (alpha, beta)": best[0] if name == "beta" else best[1],
                "it is bytes a second: beta is seconds a byte": 1 / best[1] if name == "beta" else best[0],
                "it is the slope of a line through the origin: a message of 0 bytes costs alpha": slope,
                "it is the slope between two points: least squares uses them all": ends,
                "a line may cross the axis below 0: return what fits best": 0.0,
                "relative errors are made small: least squares weighs each second of error alike": relative[
                    int(name == "beta")
                ],
                "digits are lost: add in Python floats or fp64, not in fp32": mine if rounded else math.inf,
            }
            value = torch.tensor(float(mine), dtype=torch.float64)
            candidates = {k: torch.as_tensor(v, dtype=torch.float64) for k, v in known.items()}
            equal(value, theirs, name, known=candidates, rtol=1e-4, atol=0)


@on_ranks(2, 3, 4)
def test_ring_all_reduce_seconds(answer: Answer, group: WatchedGroup) -> None:
    n = 8 * group.size
    case(f"{4 * n} bytes: what a real ring sends here")
    oracle = group.oracle()
    ring.all_reduce(oracle, torch.zeros(n))
    alpha, beta = 0.5, 0.25
    messages, sent = oracle.ledger.calls()["send"], oracle.ledger.sent_bytes()["send"]
    seconds(answer, 4 * n, group.size, alpha, beta, messages * alpha + sent * beta)
    for nbytes, ranks in ((1e6, 1), (1e6, 64), (10, 4)):
        case(f"{nbytes:g} bytes on {ranks} ranks")
        steps = [1e-9 + nbytes / ranks * 1e-9 for _ in range(2 * (ranks - 1))]
        seconds(answer, nbytes, ranks, 1e-9, 1e-9, sum(steps))


def seconds(answer: Answer, nbytes: float, ranks: int, alpha: float, beta: float, expected: float) -> None:
    found = answer.ring_all_reduce_seconds(nbytes, ranks, alpha, beta)
    require(isinstance(found, int | float), f"the result is {found!r}, expected seconds as a float")
    known = {
        "each message carries a chunk of nbytes / N, not all of nbytes": 2 * (ranks - 1) * (alpha + nbytes * beta),
        "that is one half: an all-reduce is a reduce-scatter and an all-gather": expected / 2,
        "alpha is paid for every message, not once": alpha + expected - 2 * (ranks - 1) * alpha,
        "nbytes / N is rounded down: on average a chunk has that many bytes": 2
        * (ranks - 1)
        * (alpha + nbytes // ranks * beta),
    }
    tensors = {k: torch.tensor(float(v), dtype=torch.float64) for k, v in known.items()}
    exact = torch.tensor(expected, dtype=torch.float64)
    equal(torch.tensor(float(found), dtype=torch.float64), exact, "the time", known=tensors, atol=0)


def judge_ring(watched: WatchedGroup, oracle: WatchedGroup, what: str, dtype: torch.dtype) -> None:
    """To the right alone, as many bytes as refimpl's ring, one message at a time, and none left open."""
    to_the_right(watched)
    same_traffic(watched, oracle, what, itemsize=dtype.itemsize)
    one_at_a_time(watched, what)
    all_done(watched, what)


def to_the_right(group: WatchedGroup) -> None:
    right = (group.rank + 1) % group.size
    wrong = sorted({e.tag for e in starts(group.ledger, "send")} - {f"to {right}"})
    headline = f"this rank sends {' and '.join(wrong)}: on a ring it sends to its right neighbour, {right}, alone"
    require(not wrong, headline, *group.transcript())
