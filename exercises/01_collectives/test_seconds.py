"""Grades chapter 01's clock: the line through measurements, and what a ring takes by it."""

import math

import torch

from refimpl.comm import ring
from refimpl.grading.compare import equal, require
from refimpl.grading.grade import on_ranks
from refimpl.grading.memory import untouched
from refimpl.grading.rank import Answer, case
from refimpl.grading.traffic import WatchedGroup


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
