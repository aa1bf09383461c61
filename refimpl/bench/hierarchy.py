"""All-reduces over nodes joined by a slow link: each algorithm flat and in two levels, beside what its formula predicts.

The link is that of `refimpl.comm.link`, the nodes are consecutive ranks of this machine. Alpha and beta of both levels
are measured in the same world just before, by pairs of ranks (`topology.measure`), and the formulas of `alpha_beta` are
given nothing else.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median

from refimpl import launch
from refimpl.bench.race import Times, Turns, race, slowest
from refimpl.comm import halving, hierarchy, ring, tree
from refimpl.comm.alpha_beta import AlphaBeta, Choice, Levels, pieces, predict
from refimpl.comm.axes import neighbours
from refimpl.comm.group import Group
from refimpl.comm.link import Link
from refimpl.comm.nodes import RANKS_PER_NODE
from refimpl.comm.topology import measure as measure_links

HEAT = ("nodes", "ranks", "bytes", "link")  # what all rows of a heat have in common
RING = Choice(two_level=False, algorithm="ring")


@dataclass(frozen=True)
class Row:
    """`ms`: median over calls of the slowest rank. `gain`: times as fast as the flat ring, measured and predicted."""

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
    found = measure_links(group)
    # Who is a node is known here; how good the links are is measured.
    inside = [pair for pair in found.pairs if pair[0] // each == pair[1] // each]
    levels = Levels(
        each,
        group.size // each,
        _middle([found.pairs[pair] for pair in inside] or list(found.pairs.values())),
        _middle([link for pair, link in found.pairs.items() if pair not in inside]),
        found.crowd,
        found.gamma,
    )
    x = group.empty(size // 4, group_dtype()).zero_()
    return levels, race(group, {str(way): call for way, call in contestants(group, near, far, levels, x).items()}, turns)
