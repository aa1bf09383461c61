"""The model of time: fitted exactly where times are exact, its formulas those of the algorithms' own messages."""

import math

import pytest
from hypothesis import given, strategies

from refimpl.comm import alpha_beta
from refimpl.comm.alpha_beta import AlphaBeta, fit, one_level
from refimpl.comm.halving import rounds
from refimpl.plan.time import Link, ring_all_reduce_seconds

POSITIVE = strategies.floats(1e-9, 1e-2)
LINK = AlphaBeta(5e-5, 1e-9)


@given(POSITIVE, POSITIVE)
def test_exact_times_give_back_alpha_and_beta(alpha: float, beta: float) -> None:
    sizes = [8, 4096, 1 << 20]
    found = fit(sizes, [alpha + beta * n for n in sizes])
    for n in sizes:
        assert found.seconds(n) == pytest.approx(alpha + beta * n, rel=1e-6)


@given(strategies.lists(strategies.floats(1e-6, 1.0), min_size=4, max_size=4))
def test_no_fit_has_a_smaller_relative_error(times: list[float]) -> None:
    """Among lines that fall nowhere: a little more or less alpha or beta is never nearer."""
    sizes = [8, 1000, 50_000, 1_000_000]

    def error(link: AlphaBeta) -> float:
        return sum((link.seconds(n) / t - 1) ** 2 for n, t in zip(sizes, times, strict=True))

    found = fit(sizes, times)
    assert found.alpha >= 0
    assert found.beta >= 0
    for da, db in ((0.01, 0), (-0.01, 0), (0, 0.01), (0, -0.01), (0.01, -0.01), (-0.01, 0.01)):
        other = AlphaBeta(found.alpha + da * max(found.alpha, 1e-6), found.beta + db * max(found.beta, 1e-12))
        if min(other.alpha, other.beta) >= 0:
            assert error(found) <= error(other) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("sizes", "times"), [([8], [1.0]), ([8, 8], [1.0, 2.0]), ([8, 9], [0.0, 1.0]), ([8, 9], [1.0])]
)
def test_what_cannot_be_fitted_is_refused(sizes: list[float], times: list[float]) -> None:
    with pytest.raises(ValueError, match="two sizes or more"):
        fit(sizes, times)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8, 13])
def test_formulas_add_up_the_messages(ranks: int) -> None:
    n = 1_000_000.0
    ring = sum(LINK.seconds(n / ranks) for _ in range(ranks - 1))
    halved = sum(LINK.seconds((there - kept) * n / ranks) for kept, there in rounds(ranks))
    for collective, times in (("reduce_scatter", 1), ("all_gather", 1), ("all_reduce", 2)):
        assert one_level(collective, "ring", n, ranks, LINK) == pytest.approx(times * ring)
        assert one_level(collective, "halving", n, ranks, LINK) == pytest.approx(times * halved)
    link = Link(LINK.alpha, 1 / LINK.beta)
    assert one_level("all_reduce", "ring", n, ranks, LINK) == pytest.approx(ring_all_reduce_seconds(n, ranks, link))
    added = one_level("all_reduce", "ring", n, ranks, LINK, gamma=1.0) - one_level("all_reduce", "ring", n, ranks, LINK)
    assert added == pytest.approx(n * (ranks - 1) / ranks)


def test_thakurs_table() -> None:
    """Thakur, Rabenseifner & Gropp 2005: recursive doubling for short messages, Rabenseifner's for long ones.

    Their formulas for an all-reduce at p = 2^k: ring 2(p-1) alpha + 2 (p-1)/p n beta + (p-1)/p n gamma,
    Rabenseifner 2 lg p alpha + the same of beta and gamma.
    """
    for p in (2, 4, 8, 64):
        n, gamma = 123_456.0, 3e-10
        tail = 2 * (p - 1) / p * n * LINK.beta + (p - 1) / p * n * gamma
        theirs = 2 * math.log2(p) * LINK.alpha + tail
        assert one_level("all_reduce", "halving", n, p, LINK, gamma) == pytest.approx(theirs)
        assert one_level("all_reduce", "ring", n, p, LINK, gamma) == pytest.approx(2 * (p - 1) * LINK.alpha + tail)


def test_a_trees_time_tends_to_twice_the_buffer() -> None:
    large = 1e12
    assert one_level("all_reduce", "tree", large, 64, LINK) == pytest.approx(2 * large * LINK.beta, rel=0.01)
    best = one_level("all_reduce", "tree", 1e7, 64, LINK)
    k = alpha_beta.pieces(1e7, 64, LINK)
    assert k > 1
    for other in (k // 2, 2 * k):
        assert best <= 2 * (6 + other - 1) * LINK.seconds(1e7 / other)


def test_an_unknown_algorithm_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        one_level("all_gather", "tree", 1.0, 4, LINK)
