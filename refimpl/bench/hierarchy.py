"""All-reduces over nodes joined by a slow link: algorithms flat and in two levels, beside what formulas predict.

The link is that of `refimpl.comm.link`, the nodes are consecutive ranks of this machine. Alpha and beta of both levels
are measured in the same world just before (`topology.measure`), alpha while all ranks send, as they do in a collective,
with messages as long as those of the algorithms, and the formulas of `level_model` are given nothing else. A call
begins on all ranks at one instant, and is over with the last of them. Of calls and of messages the least times count:
what a busy machine adds is in the others.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from refimpl import launch
from refimpl.bench.comm import numbers
from refimpl.bench.race import Times, Turns, from_one_instant, race, slowest
from refimpl.comm import halving, hierarchy, ring, tree
from refimpl.comm.alpha_beta import pieces
from refimpl.comm.axes import neighbours
from refimpl.comm.group import Group
from refimpl.comm.hierarchy import Algorithm
from refimpl.comm.level_model import Choice, Levels, predict
from refimpl.comm.link import Link
from refimpl.comm.nodes import RANKS_PER_NODE
from refimpl.comm.topology import measure as measure_links
from refimpl.comm.topology import tell_floor
from refimpl.ranks.environment import variables

HEAT = ("nodes", "ranks", "bytes", "link")  # what all rows of a heat have in common
RANKS = 512  # at most
RING = Choice(two_level=False, algorithm="ring")


@dataclass(frozen=True)
class Row:
    """`ms`: least over calls of the slowest rank. `gain`: times as fast as the flat ring, measured and predicted."""

    way: str
    nodes: int
    ranks: int
    bytes: int
    link: str
    ms: float
    predicted_ms: float
    gain: float
    predicted_gain: float


def heat(each: int, size: int, link: Link, turns: Turns) -> tuple[Levels, Times]:
    """Runs on every rank: measure the links, then race every way to all-reduce `size` bytes of zeros."""
    group = Group.world(link=link)
    group.share_messages()
    near, far = neighbours(group, each)
    near.share_messages()
    far.share_messages()
    tell_floor(group)
    messages = (8, 8 + size // group.size, 16 + size // each)
    levels = measure_links(group, messages, turns.turns * turns.steps, each).by_nodes(each)
    x = group.empty(size // 4, torch.float32).zero_()
    ways = contestants(group, near, far, levels, x)
    return levels, race(group, {str(way): call for way, call in ways.items()}, turns, from_one_instant)


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
    """The rows of one heat (nodes, bytes) at a time: `each` ranks a node, `sizes` in bytes, about.

    ValueError for the link, and for more ranks than are started at once.
    """
    asked = Link.parse(link)
    if most := [count for count in nodes if count * each > RANKS]:
        raise ValueError(f"{most[0]} nodes of {each} ranks are {most[0] * each} processes: at most {RANKS}")
    for count in nodes:
        for size in (4 * numbers(size, count * each) for size in sizes):
            with variables({RANKS_PER_NODE: str(each)}):
                results = launch.run(heat, each, size, asked, turns, ranks=count * each, device="cpu", timeout=600)
            yield rows(results[0][0], slowest([times for _, times in results]), size, link)


def rows(levels: Levels, times: Times, size: int, link: str) -> list[Row]:
    """One row a way; the ring is what all are compared with."""
    predicted = {str(way): 1e3 * seconds for way, seconds in predict("all_reduce", size, levels).items()}
    ms = {way: min(calls) for way, calls in times.items()}
    first = str(RING)
    return [
        Row(
            way, levels.size, levels.ranks, size, link, value, predicted[way], ms[first] / value,
            predicted[first] / predicted[way],
        )
        for way, value in ms.items()
    ]  # fmt: skip
