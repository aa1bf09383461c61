"""All-reduces over nodes joined by a slow link: algorithms flat and in two levels, beside what formulas predict.

The link is that of `refimpl.comm.link`, the nodes are consecutive ranks of this machine. In each turn alpha and beta of
both levels are measured anew (`topology.measure`), with messages as long as those of the algorithms and while all ranks
send, as they do in a collective; then every way takes its turn, some calls in a row after one that does not count:
ranks leave a barrier up to a millisecond apart, and would be charged with that. The formulas of `alpha_beta` are given
nothing else. So a busy machine slows what is predicted as it slows what is measured, and a gain is that of one turn.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor

from refimpl import launch
from refimpl.bench.race import Turns, environment
from refimpl.comm import halving, hierarchy, ring, tree
from refimpl.comm.alpha_beta import Choice, Levels, pieces, predict
from refimpl.comm.axes import neighbours
from refimpl.comm.group import Group
from refimpl.comm.hierarchy import Algorithm
from refimpl.comm.link import Link
from refimpl.comm.nodes import RANKS_PER_NODE
from refimpl.comm.topology import measure as measure_links
from refimpl.comm.topology import tell_floor

REPEATS = 2  # of a message
HEAT = ("nodes", "ranks", "bytes", "link")  # what all rows of a heat have in common
RING = Choice(two_level=False, algorithm="ring")
Turn = tuple[Levels, dict[str, float]]  # what the links were, and milliseconds of a call, way by way


@dataclass(frozen=True)
class Row:
    """`ms`: of a call. `gain`: times as fast as the flat ring. Medians over turns; least and most of them."""

    way: str
    nodes: int
    ranks: int
    bytes: int
    link: str
    ms: float
    predicted_ms: float
    gain: float
    predicted_gain: float
    least_gain: float
    most_gain: float


def heat(each: int, size: int, link: Link, turns: Turns) -> list[Turn]:
    """Runs on every rank: turn by turn, measure the links and race every way to all-reduce `size` bytes of zeros."""
    group = Group.world(link=link)
    group.share_messages()
    near, far = neighbours(group, each)
    near.share_messages()
    far.share_messages()
    tell_floor(group)
    x = group.empty(size // 4, torch.float32).zero_()
    messages = (8, 8 + size // group.size, 16 + size // each)
    found = []
    for _ in range(turns.warm_up + turns.turns):
        levels = measure_links(group, messages, REPEATS, each).by_nodes(each)
        ways = contestants(group, near, far, levels, x)
        found.append((levels, {str(way): in_a_row(group, call, turns.steps) for way, call in ways.items()}))
    return found[turns.warm_up :]


def in_a_row(group: Group, call: Callable[[], object], times: int) -> float:
    """Milliseconds of one of so many calls, on this rank."""
    group.barrier()
    call()
    begun = time.perf_counter()
    for _ in range(times):
        call()
    return 1e3 * (time.perf_counter() - begun) / times


def contestants(group: Group, near: Group, far: Group, levels: Levels, x: Tensor) -> dict[Choice, Callable[[], object]]:
    """Each way to all-reduce x [n] in place."""
    cut = pieces(x.nbytes, group.size, levels.cable(1))
    flat: dict[str, Callable[[], object]] = {
        "ring": partial(ring.all_reduce, group, x),
        "halving": partial(halving.all_reduce, group, x),
        "tree": partial(tree.all_reduce, group, x, pieces=cut),
        "exchange": partial(group.all_reduce, x),
    }
    both: dict[str, Algorithm] = {"ring": ring, "halving": halving, "exchange": Group}
    return {
        **{Choice(two_level=False, algorithm=name): way for name, way in flat.items()},
        **{
            Choice(two_level=True, algorithm=name): partial(hierarchy.all_reduce, near, far, x, within=way, between=way)
            for name, way in both.items()
        },
    }


def measure(
    nodes: Sequence[int],
    each: int,
    sizes: Sequence[int],
    link: str,
    turns: Turns = Turns(),  # noqa: B008 (frozen)
) -> Iterator[list[Row]]:
    """The rows of one heat (nodes, bytes) at a time: `each` ranks a node, `sizes` in bytes. ValueError for the link."""
    asked = Link.parse(link)
    for count in nodes:
        for size in sizes:
            with environment({RANKS_PER_NODE: str(each)}):
                results = launch.run(heat, each, size, asked, turns, ranks=count * each, device="cpu", timeout=600)
            yield rows([slowest(ranks) for ranks in zip(*results, strict=True)], size, link)


def slowest(ranks: Sequence[Turn]) -> Turn:
    """One turn as its ranks saw it -> as the slowest did, way by way."""
    levels, first = ranks[0]
    return levels, {way: max(ms[way] for _, ms in ranks) for way in first}


def rows(turn_by_turn: Sequence[Turn], size: int, link: str) -> list[Row]:
    """One row a way; the ring is what all are compared with."""
    levels, first = turn_by_turn[0][0], str(RING)
    ms = [turn for _, turn in turn_by_turn]
    formula = [
        {str(way): 1e3 * seconds for way, seconds in predict("all_reduce", size, found).items()}
        for found, _ in turn_by_turn
    ]
    found = []
    for way in ms[0]:
        measured, predicted = ([turn[first] / turn[way] for turn in times] for times in (ms, formula))
        times = (median(turn[way] for turn in ms), median(turn[way] for turn in formula))
        gains = (median(measured), median(predicted), min(measured), max(measured))
        found.append(Row(way, levels.size, levels.ranks, size, link, *times, *gains))
    return found
