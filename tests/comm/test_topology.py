"""Who is near is read off the times of the pairs; what is measured is the same on every rank."""

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import worlds

from refimpl.comm.alpha_beta import AlphaBeta
from refimpl.comm.group import Group
from refimpl.comm.topology import ROW, Topology, _together, measure, neighbourhoods

run = functools.partial(worlds.run, device="cpu")

NEAR, FAR = AlphaBeta(1e-6, 1e-10), AlphaBeta(1e-4, 8e-9)


def pairs(ranks: int, node: dict[int, int]) -> dict[tuple[int, int], AlphaBeta]:
    """No two pairs quite alike."""
    every = [(a, b) for a in range(ranks) for b in range(a + 1, ranks)]
    links = {p: NEAR if node[p[0]] == node[p[1]] else FAR for p in every}
    return {p: AlphaBeta(k.alpha * (1 + i / 50), k.beta * (1 + i / 50)) for i, (p, k) in enumerate(links.items())}


@pytest.mark.parametrize(
    "nodes", [[[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 1, 2], [3, 4, 5]], [[0], [1, 2, 3]], [[0, 1, 2]]]
)
def test_nodes_are_found_whatever_their_numbers(nodes: list[list[int]]) -> None:
    ranks = sum(map(len, nodes))
    found = Topology(ranks, pairs(ranks, {r: i for i, node in enumerate(nodes) for r in node}), 1.0, 0.0)
    assert found.nodes == nodes
    each = len(nodes[0])
    regular = nodes == [list(range(i, i + each)) for i in range(0, ranks, each)]
    assert (found.levels is not None) == regular
    if found.levels is not None:
        assert (found.levels.each, found.levels.size) == (each, len(nodes))
        assert NEAR.beta <= found.levels.near.beta <= 2 * NEAR.beta
        assert found.levels.far.beta >= (FAR if len(nodes) > 1 else NEAR).beta
    assert found.of(1, 0) is found.of(0, 1)


def test_formulas_have_the_alpha_of_ranks_that_all_send_and_a_pairs_own_stands_beside() -> None:
    every = pairs(4, {0: 0, 1: 0, 2: 1, 3: 1})
    busy = AlphaBeta(3e-5, 2e-10), AlphaBeta(4e-4, 1.6e-8)
    found = Topology(4, every, 2.0, 0.0, inside=busy[0], across=busy[1])
    near, far = found.alone(2)
    assert NEAR.alpha <= near.alpha < far.alpha <= 2 * FAR.alpha
    levels = found.by_nodes(2)
    assert (levels.near, levels.far) == (busy[0], AlphaBeta(busy[1].alpha, far.beta))
    assert levels.cable(2).beta == 2 * far.beta


def test_even_times_are_one_node_and_one_slow_pair_is_none() -> None:
    every = [(a, b) for a in range(4) for b in range(a + 1, 4)]
    assert neighbourhoods(4, dict.fromkeys(every, 1.0)) == [[0, 1, 2, 3]]
    assert neighbourhoods(4, {p: 1.0 + 0.3 * i for i, p in enumerate(every)}) == [[0, 1, 2, 3]]
    assert neighbourhoods(4, {p: 10.0 if p == (0, 3) else 1.0 for p in every}) == [[0, 1, 2, 3]]
    assert neighbourhoods(1, {}) == [[0]]


class Story:
    """Rank 0 of two: what it was told to do, in order."""

    rank, device = 0, torch.device("cpu")

    def __init__(self) -> None:
        self.told: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: object, **options: object) -> SimpleNamespace:
            self.told.append(name)
            return SimpleNamespace(wait=lambda: None)

        return call

    def all_gather_object(self, mine: object) -> list[object]:
        return [mine]


def test_a_row_is_timed_from_when_the_device_has_the_message_before_it() -> None:
    """On a GPU `send_recv` returns at once, and the clock would run while the other rank is still at the barrier."""
    group = Story()
    _together(group, {0: 1}, [8], repeats=1)  # type: ignore[arg-type]
    assert group.told == ["barrier", "send_recv", "settle", *["send_recv"] * ROW, "settle"] * 2


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_pair_is_measured_and_all_ranks_know_it(ranks: int) -> None:
    def check() -> Topology:
        group = Group.world()
        with pytest.raises(ValueError, match="two sizes"):
            measure(group, sizes=[8, 8])
        return measure(group, sizes=[8, 4096], repeats=2)

    results = run(check, ranks=ranks)
    assert set(results[0].pairs) == {(a, b) for a in range(ranks) for b in range(a + 1, ranks)}
    assert all(link.seconds(4096) > 0 for link in results[0].pairs.values())
    assert results[0].gamma > 0
    assert results == [results[0]] * ranks
