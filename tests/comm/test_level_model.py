"""The model of two levels: what the algorithms' own messages take when they are played on cables one by one."""

import heapq
from collections import Counter, defaultdict
from dataclasses import replace

import pytest

from refimpl.comm.alpha_beta import HALVES, AlphaBeta, one_level
from refimpl.comm.halving import rounds
from refimpl.comm.level_model import FLAT, Choice, Levels, choose, far_part, flat, predict, two_level

LINK = AlphaBeta(5e-5, 1e-9)


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
    sends = 2 * (ranks - 1)
    crossed = [sum((start + hop) % each == each - 1 for hop in range(sends)) for start in range(ranks)]
    crossings = max(crossed)  # by the chunk that crosses most often on its way round and round
    assert ways[Choice(False, "ring")] / ways[Choice(True, "ring")] == pytest.approx(
        crossings / (2 * (size - 1)), rel=1e-4
    )
    assert choose("all_reduce", 1e8, levels).two_level
    # Chunk i of every rank to rank i: each node sends L times what two levels send.
    half = flat("reduce_scatter", "exchange", 1e12, levels) / two_level("reduce_scatter", "exchange", 1e12, levels)
    assert half == pytest.approx(each, rel=1e-4)


Round = list[tuple[int, int, float]]  # messages that set off together: sender, receiver, bytes


def played(rounds: list[Round], levels: Levels) -> float:
    """Seconds until all rounds are over: one cable leads out of a node, on which who comes first goes first.

    A rank begins a round when its messages of the last have left and those to it are there. Inside a node nobody waits.
    """
    out: list[dict[int, list[tuple[int, float]]]] = [defaultdict(list) for _ in rounds]
    missing = [Counter(range(levels.ranks)) for _ in rounds]  # a rank's own beginning, and the messages to it
    for number, messages in enumerate(rounds):
        for sender, receiver, size in messages:
            out[number][sender].append((receiver, size))
            missing[number][receiver] += 1
    free = [0.0] * levels.size
    over = [[0.0] * levels.ranks for _ in rounds]
    begins = [(0.0, rank, 0) for rank in range(levels.ranks)]
    while begins:
        now, rank, number = heapq.heappop(begins)
        node, left, touched = rank // levels.each, now, [rank]
        for receiver, size in out[number][rank]:
            arrives = now + levels.near.seconds(size)
            if receiver // levels.each != node:
                left = free[node] = max(free[node], now) + size * levels.far.beta
                arrives = left + levels.far.alpha
            over[number][receiver] = max(over[number][receiver], arrives)
            touched.append(receiver)
        over[number][rank] = max(over[number][rank], left)
        for touch in touched:
            missing[number][touch] -= 1
            if not missing[number][touch] and number + 1 < len(rounds):
                heapq.heappush(begins, (over[number][touch], touch, number + 1))
    return max(over[-1])


def ring_of(members: list[int], size: float, halves: int) -> list[Round]:
    """In which all send to the next."""
    around = [(a, b, size / len(members)) for a, b in zip(members, members[1:] + members[:1], strict=True)]
    return [around] * (halves * (len(members) - 1))


def exchange_of(members: list[int], size: float, halves: int) -> list[Round]:
    return [[(a, b, size / len(members)) for a in members for b in members if a != b]] * halves


def halving_of(members: list[int], size: float, halves: int) -> list[Round]:
    n = len(members)
    down = [
        [(a, members[(i + kept) % n], (there - kept) * size / n) for i, a in enumerate(members)]
        for kept, there in rounds(n)
    ]
    return down if halves == 1 else down + down[::-1]


def side_by_side(parts: list[list[Round]]) -> list[Round]:
    return [[message for messages in together for message in messages] for together in zip(*parts, strict=True)]


WAYS = {"ring": ring_of, "exchange": exchange_of, "halving": halving_of}


@pytest.mark.parametrize(("each", "size"), [(2, 2), (2, 4), (4, 2), (8, 4), (3, 3)])
@pytest.mark.parametrize("nbytes", [8e3, 8e4, 4e5, 1e6, 1e7])
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("collective", ["reduce_scatter", "all_reduce"])
def test_formulas_are_what_the_messages_take_if_they_are_played(
    each: int, size: int, nbytes: float, name: str, collective: str
) -> None:
    """Within an eighth, over 1 ms and 1 Gbit/s."""
    levels = Levels(each, size, AlphaBeta(1e-6, 1e-12), AlphaBeta(1e-3, 8e-9), crowd=each)
    halves, way = HALVES[collective], WAYS[name]
    everyone = way(list(range(levels.ranks)), nbytes, halves)
    if name != "halving":
        assert flat(collective, name, nbytes, levels) == pytest.approx(played(everyone, levels), rel=0.125)
    lines = side_by_side([way(list(range(place, levels.ranks, each)), nbytes / each, halves) for place in range(each)])
    assert far_part(collective, name, nbytes / each, levels) == pytest.approx(played(lines, levels), rel=0.125)


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


def test_an_unknown_collective_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        predict("gossip", 1.0, Levels(2, 2, LINK, LINK))
