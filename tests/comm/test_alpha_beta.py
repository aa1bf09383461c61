"""The model of time: fitted exactly where times are exact, its formulas those of the algorithms' own messages."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, strategies

from refimpl.comm import alpha_beta
from refimpl.comm.alpha_beta import FLAT, AlphaBeta, Choice, Levels, choose, fit, flat, one_level, predict, two_level
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


def test_on_equal_links_two_levels_are_no_gain_and_one_level_is_the_flat_formula() -> None:
    even = Levels(1, 8, LINK, LINK)
    for name in FLAT:
        assert flat("all_reduce", name, 1e6, even) == pytest.approx(one_level("all_reduce", name, 1e6, 8, LINK))
    assert {way.two_level for way in predict("all_reduce", 1e6, even)} == {False}
    node = Levels(8, 1, LINK, LINK)
    assert flat("reduce_scatter", "ring", 1e6, node) == one_level("reduce_scatter", "ring", 1e6, 8, LINK)


@pytest.mark.parametrize(("each", "size"), [(2, 2), (2, 4), (4, 2), (8, 16)])
def test_the_factor_of_two_levels_on_a_shared_cable(each: int, size: int) -> None:
    ranks = each * size
    levels = Levels(each, size, AlphaBeta(0.0, 0.0), AlphaBeta(1e-4, 8e-9), crowd=each)
    ways = predict("all_reduce", 1e12, levels)
    large = ways[Choice(False, "ring")] / ways[Choice(True, "ring")]
    assert large == pytest.approx(size * (ranks - 1) / (ranks * (size - 1)), rel=1e-4)
    ways = predict("all_reduce", 1e-3, levels)
    crossed = [sum((start + hop) % each == each - 1 for hop in range(ranks - 1)) for start in range(ranks)]
    crossings = max(crossed)  # by the chunk that crosses most often on its way round
    assert ways[Choice(False, "ring")] / ways[Choice(True, "ring")] == pytest.approx(crossings / (size - 1), rel=1e-4)
    assert choose("all_reduce", 1e8, levels).two_level
    # Chunk i of every rank to rank i: each node sends L times what two levels send.
    half = flat("reduce_scatter", "exchange", 1e12, levels) / two_level("reduce_scatter", "exchange", 1e12, levels)
    assert half == pytest.approx(each, rel=1e-4)


def played_ring(levels: Levels, size: float) -> float:
    """Seconds of a ring's reduce-scatter: a cable a node, on which a chunk is for n/N beta, and arrives alpha later."""
    ranks, part = levels.ranks, size / levels.ranks
    free, here = [0.0] * levels.size, [0.0] * ranks  # when the node's cable is; when each rank has its next chunk
    for _ in range(ranks - 1):
        arrives = list(here)
        for rank in sorted(range(ranks), key=lambda r: here[r]):
            node, there = rank // levels.each, (rank + 1) % ranks
            if there // levels.each == node:
                arrives[there] = here[rank] + levels.near.seconds(part)
            else:
                free[node] = max(free[node], here[rank]) + part * levels.far.beta
                arrives[there] = free[node] + levels.far.alpha
        here = [max(a, b) for a, b in zip(arrives, here, strict=True)]  # what a rank sends goes out before
    return max(here)


@pytest.mark.parametrize(("each", "size"), [(2, 2), (2, 4), (4, 2), (8, 4)])
@pytest.mark.parametrize("nbytes", [8e3, 8e4, 4e5, 1e6, 1e7])
def test_a_ring_hides_latency_behind_the_chunks_that_follow(each: int, size: int, nbytes: float) -> None:
    """Within an eighth, as if it were played; with all alphas on top of the bytes it is up to 1.4 times that."""
    levels = Levels(each, size, AlphaBeta(1e-5, 1e-11), AlphaBeta(1e-3, 8e-9), crowd=each)
    assert flat("reduce_scatter", "ring", nbytes, levels) == pytest.approx(played_ring(levels, nbytes), rel=0.125)


def test_a_cable_to_each_node_lets_an_exchange_use_all() -> None:
    """3 nodes of 2: chunks of n/6. To each other node go 2 x 2 of them, and one of n/6 by two ranks in two levels."""
    n, shared = 6e6, Levels(2, 3, AlphaBeta(0.0, 0.0), AlphaBeta(0.0, 1e-9), crowd=2.0)
    each = replace(shared, pairwise=True)
    assert flat("reduce_scatter", "exchange", n, shared) == pytest.approx(8e6 * 1e-9)
    assert flat("reduce_scatter", "exchange", n, each) == pytest.approx(4e6 * 1e-9)
    assert two_level("reduce_scatter", "exchange", n, each) == pytest.approx(2e6 * 1e-9)
    assert two_level("all_to_all", "exchange", n, each) == pytest.approx(4e6 * 1e-9)
    # Three blocks to the rank 3 further (one of each pair of nodes), one to 2 further (two of them), one to the next.
    assert flat("reduce_scatter", "halving", n, each) == pytest.approx((3 + 2 + 1) * 1e6 * 1e-9)
    assert flat("reduce_scatter", "halving", n, shared) == pytest.approx((6 + 2 + 1) * 1e6 * 1e-9)
    assert flat("reduce_scatter", "ring", n, each) == flat("reduce_scatter", "ring", n, shared)


def test_own_cables_make_the_flat_ring_wait_and_nobody_crowd() -> None:
    levels = Levels(4, 2, AlphaBeta(0.0, 0.0), AlphaBeta(0.0, 1e-9), crowd=1.0)
    assert two_level("all_reduce", "ring", 8e6, levels) == pytest.approx(2 * 8e6 / 4 / 2 * 1e-9)
    assert flat("all_reduce", "ring", 8e6, levels) == pytest.approx(2 * 8e6 * 7 / 8 * 1e-9)


def test_an_unknown_collective_or_algorithm_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        predict("gossip", 1.0, Levels(2, 2, LINK, LINK))
    with pytest.raises(KeyError):
        one_level("all_gather", "tree", 1.0, 4, LINK)
