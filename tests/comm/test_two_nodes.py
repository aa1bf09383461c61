"""Four ranks on two nodes with a link between them: what crosses it, by each way of an all-reduce, is the formulas'."""

import functools
from unittest import mock

import pytest
import torch
import worlds
from given import agrees, everyone, given

from refimpl.comm import halving, hierarchy, ring, tree
from refimpl.comm.alpha_beta import AlphaBeta
from refimpl.comm.group import Group
from refimpl.comm.level_model import Choice
from refimpl.comm.levels import ByLevels, measured, two_level
from refimpl.comm.link import Link
from refimpl.comm.nodes import RANKS_PER_NODE
from refimpl.comm.topology import Topology, measure

run = functools.partial(worlds.run, device="cpu")
FAST = Link(1e13)  # what crosses is counted, nobody has to wait
N = 1200  # elements
SIZE = 4 * N


@pytest.fixture(autouse=True)
def _two_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RANKS_PER_NODE, "2")


def crossed() -> dict[str, tuple[int, int]]:
    """On a rank: way -> (bytes that it sent over the link, messages there)."""
    found = {}
    for name, way in {
        "ring": ring.all_reduce,
        "halving": halving.all_reduce,
        "tree": tree.all_reduce,
        "exchange": Group.all_reduce,
    }.items():
        group = Group.world(link=FAST)
        x = given(group.rank, N)
        way(group, x)  # type: ignore[operator]
        assert agrees(x, everyone(4, N), "sum")
        found[name] = sum(group.ledger.crossed_bytes().values()), group.ledger.calls().get("send", 0)
    group = two_level(Group.world(link=FAST))
    levels = group.transport
    assert isinstance(levels, ByLevels)
    x = given(group.rank, N)
    group.all_reduce(x, tag="gradients")
    assert agrees(x, everyone(4, N), "sum")
    found["two levels"] = group.ledger.crossed_bytes("tag")["gradients"], levels.far.ledger.calls()["all_reduce"]
    levels.far.ledger.reset()
    hierarchy.all_reduce(levels.near, levels.far, x, within=ring, between=ring)
    found["two rings"] = sum(levels.far.ledger.crossed_bytes().values()), levels.far.ledger.calls()["send"]
    assert levels.near.ledger.crossed_bytes() == {}
    chosen = two_level(
        Group.world(link=FAST), choose=lambda collective, size: Choice(two_level=False, algorithm="ring")
    )
    chosen.all_reduce(x)
    found["ring, as chosen"] = sum(chosen.ledger.crossed_bytes().values()), 0
    return found


def test_what_crosses_is_what_the_formulas_say() -> None:
    by_rank = run(crossed, ranks=4)
    nodes = {way: [sum(rank[way][0] for rank in by_rank[i : i + 2]) for i in (0, 2)] for way in by_rank[0]}
    assert nodes["two levels"] == nodes["two rings"] == [SIZE, SIZE]  # 2n(F-1)/F
    assert nodes["ring"] == nodes["ring, as chosen"] == [SIZE * 3 // 2] * 2  # 2n(N-1)/N
    assert nodes["exchange"] == [2 * SIZE] * 2  # L times two levels'
    assert nodes["halving"] == [2 * (SIZE // 2 * 2 + SIZE // 4)] * 2  # both ranks half, then one of them a quarter
    assert sum(nodes["tree"]) == sum(  # an edge between nodes carries half of the buffer, up and down
        SIZE
        for rank in range(4)
        for place in tree.places(rank, 4)
        if place.parent is not None and place.parent // 2 != rank // 2
    )
    # The ring's messages wait for the link 2(N-1) times, one after another; the two rings' 2(F-1) times.
    assert [rank["ring"][1] for rank in by_rank] == [6] * 4
    assert [rank["two rings"][1] for rank in by_rank] == [2] * 4
    assert [rank["ring"][0] > 0 for rank in by_rank] == [False, True, False, True]
    assert len({rank["two rings"][0] for rank in by_rank}) == 1  # all ranks of a node share the work


def test_what_is_measured_is_not_faster_than_the_link_and_the_choice_follows() -> None:
    def check() -> tuple[bool, bool]:
        group = Group.world(link=Link(1e8, 10e-3))
        group.share_messages()
        found = measure(group, sizes=[8, 20_000], repeats=1)
        far = [link.seconds(8) for (a, b), link in found.pairs.items() if a // 2 != b // 2]
        if found.nodes == [[0, 1], [2, 3]]:  # as long as nothing else makes near messages slow
            assert found.inside is not None
            assert found.by_nodes(2).near == found.inside
        near, slow = AlphaBeta(1e-5, 1e-10), AlphaBeta(10e-3, 8e-8)
        pairs = {(a, b): near if a // 2 == b // 2 else slow for a, b in found.pairs}
        chosen = measured(group, Topology(4, pairs, crowd=2.0, gamma=0.0))  # as an idle machine measures
        x = given(group.rank, 1000)
        chosen.all_reduce(x)
        assert agrees(x, everyone(4, 1000), "sum")
        return min(far) > 9e-3, isinstance(chosen.transport, ByLevels)

    assert run(check, ranks=4) == [(True, True)] * 4


def test_messages_are_measured_on_the_way_that_collectives_take() -> None:
    def check() -> bool:
        seen, found = list[Group](), Topology(2, {(0, 1): AlphaBeta(1e-5, 1e-10)}, crowd=1.0, gamma=0.0)
        with mock.patch("refimpl.comm.levels.measure", lambda probe: seen.append(probe) or found):
            measured(Group.world())
        return seen[0].messages is seen[0].transport

    assert run(check, ranks=2) == [True, True]


def test_an_all_to_all_crosses_in_one_message_a_node() -> None:
    def check() -> tuple[int, int, int, int]:
        flat, levels = Group.world(link=FAST), two_level(Group.world(link=FAST))
        x = torch.arange(8.0) + 100 * flat.rank
        ours, theirs = torch.empty(8), torch.empty(8)
        flat.all_to_all(theirs, x)
        levels.all_to_all(ours, x)
        assert torch.equal(ours, theirs)
        transport = levels.transport
        assert isinstance(transport, ByLevels)
        far = transport.far
        return (
            flat.ledger.crossed_bytes()["all_to_all"],
            levels.ledger.crossed_bytes()["all_to_all"],
            far.size,
            far.ledger.calls()["all_to_all"],
        )

    assert run(check, ranks=4) == [(16, 16, 2, 1)] * 4
