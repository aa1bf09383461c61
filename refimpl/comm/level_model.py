"""What a collective costs on two levels, L ranks a node and F nodes, and which way of doing it costs least.

Ranks of a node that send far at once share its cable (or, `pairwise`, those do that send to the same node). How much,
is measured: `crowd` is the far beta with all ranks of a node sending, over that of one alone; L if they share one
cable, 1 if each has its own. And while one message is late by alpha, another can be on the cable:

    ring        One rank a node sends far. It takes the cable's time and one alpha, or that of a chunk on its way round,
                which crosses on F of N hops: whichever is more.
    exchange    All L send N - L chunks. The second half begins at the ranks that are served first, and so hides as much
                of an alpha as the last sender's other chunks are on the cable.
    halving     Of a round that sends s ranks further, min(s, L) a node send far. Where s < L, that is a part of the
                ranks: on the way through these rounds a chunk crosses once in L ranks.
    tree        All edges are counted as far.
    two levels  Near, far, near. The L lines of F ranks take turns on the cable. The far part takes its time and one
                alpha, or what the last line takes once it has waited for the first messages of the others: whichever
                is more.

Thakur & Gropp 2003 ("Improving the performance of collective operations in MPICH") for clusters of nodes; NCCL's table
is in src/graph/tuning.cc. The tests play every message; `refimpl bench hierarchy` measures.
"""

from collections import Counter
from dataclasses import dataclass

from refimpl.comm.alpha_beta import HALVES, AlphaBeta, adding, one_level
from refimpl.comm.halving import rounds
from refimpl.comm.tree import places

FLAT = ("exchange", "ring", "halving", "tree")


@dataclass(frozen=True)
class Levels:
    """`size` nodes of `each` ranks. `gamma`: seconds a byte added; `crowd`: see above.

    `pairwise`: whether a node has a cable to each other node, not one to all of them.
    """

    each: int
    size: int
    near: AlphaBeta
    far: AlphaBeta
    crowd: float = 1.0
    gamma: float = 0.0
    pairwise: bool = False

    @property
    def ranks(self) -> int:
        return self.each * self.size

    @property
    def cables(self) -> int:
        """Over which a rank that sends to all nodes at once does so."""
        return self.size - 1 if self.pairwise else 1

    def cable(self, senders: int) -> AlphaBeta:
        """What each of so many ranks of a node sees that send far at once."""
        share = (senders - 1) / (self.each - 1) if self.each > 1 else 0.0
        return AlphaBeta(self.far.alpha, self.far.beta * (1 + (self.crowd - 1) * share))


@dataclass(frozen=True)
class Choice:
    """How a collective is done. `algorithm`: of both levels, where there are two."""

    two_level: bool
    algorithm: str

    def __str__(self) -> str:
        return ("two-level " if self.two_level else "flat ") + self.algorithm


def flat(collective: str, algorithm: str, size: float, levels: Levels) -> float:
    """Seconds of one algorithm among all ranks, numbered node by node. KeyError if there is no such algorithm."""
    ranks, halves = levels.ranks, HALVES[collective]
    if levels.size == 1:
        return one_level(collective, algorithm, size, ranks, levels.near, levels.gamma)
    if algorithm == "tree":
        shared = AlphaBeta(levels.far.alpha, levels.far.beta * max(1.0, edges(levels) / 2))
        return one_level(collective, algorithm, size, ranks, shared, levels.gamma)
    way = {"exchange": _exchange, "ring": _ring, "halving": _halving}[algorithm]
    return way(size / ranks, halves, levels) + adding(collective, size * (ranks - 1) / ranks, levels.gamma)


def _exchange(part: float, halves: int, levels: Levels) -> float:
    """`part`: bytes of a chunk."""
    away = (levels.ranks - levels.each) * part / levels.cables
    far = halves * levels.cable(levels.each).seconds(away)
    if levels.each == 1:
        return far
    hidden = (halves - 1) * min(levels.far.alpha, (away - part) * levels.far.beta)
    return max(halves * levels.near.seconds((levels.each - 1) * part), far - hidden)


def _ring(part: float, halves: int, levels: Levels) -> float:
    sends = halves * (levels.ranks - 1)
    crossing, inside = levels.far.seconds(part), levels.near.seconds(part) if levels.each > 1 else 0.0
    across = -(-sends * levels.size // levels.ranks)  # hops from node to node on a way of so many
    return max(levels.far.seconds(sends * part), across * crossing + (sends - across) * inside, sends * inside)


def _halving(part: float, halves: int, levels: Levels) -> float:
    seconds, short = 0.0, 0
    for shift, there in rounds(levels.ranks):
        size, inside = (there - shift) * part, shift < levels.each
        seconds += max(
            levels.cable(senders(levels, shift)).beta * size + (0.0 if inside else levels.far.alpha),
            levels.near.seconds(size) if inside else 0.0,
        )
        short += shift if inside else 0
    return halves * (seconds + -(-short // levels.each) * levels.far.alpha)


def senders(levels: Levels, shift: int) -> int:
    """Ranks that use one cable at once, at most, when every rank sends to the one `shift` further on."""
    each, ranks = levels.each, levels.ranks
    away = [(rank // each, (rank + shift) % ranks // each) for rank in range(ranks)]
    return max(Counter(pair if levels.pairwise else pair[0] for pair in away if pair[0] != pair[1]).values())


def edges(levels: Levels) -> int:
    """Edges of both trees that lead up over one cable from a node to another, at most."""
    up = Counter(
        (rank // levels.each, place.parent // levels.each)
        for rank in range(levels.ranks)
        for place in places(rank, levels.ranks)
        if place.parent is not None and place.parent // levels.each != rank // levels.each
    )
    return max(up.values())


def two_level(collective: str, algorithm: str, size: float, levels: Levels) -> float:
    """Seconds of `hierarchy.py`'s collectives with one algorithm on both levels.

    A reduce-scatter and an all-gather go inside a node row by row, F messages of n/F.
    """
    each = levels.each
    if collective == "all_to_all":
        inside = levels.size * one_level("all_to_all", "exchange", size / levels.size, each, levels.near)
        return inside + far_part("all_to_all", "exchange", size, levels)
    outside = far_part(collective, algorithm, size / each, levels)
    if collective == "all_reduce":
        return one_level("all_reduce", algorithm, size, each, levels.near, levels.gamma) + outside
    row = one_level(collective, algorithm, size / levels.size, each, levels.near, levels.gamma)
    return levels.size * row + outside


def far_part(collective: str, algorithm: str, size: float, levels: Levels) -> float:
    """Seconds in which all L ranks of every node do `collective` with their places in the others: `size` bytes each."""
    nodes, part, link = levels.size, size / levels.size, levels.cable(1)
    cables = 1 if algorithm == "ring" else levels.cables  # a ring sends to one node only
    if algorithm == "exchange":
        link = AlphaBeta(link.alpha, link.beta / cables)
    others = levels.cable(levels.each).beta / levels.far.beta - 1 if levels.far.beta else 0.0
    first = {"exchange": nodes - 1, "ring": 1, "halving": nodes // 2}[algorithm] * part
    own = one_level(collective, algorithm, size, nodes, link)
    sent = HALVES[collective] * (nodes - 1) * part * (1 + others)  # by all who share a cable
    busy = AlphaBeta(levels.far.alpha, levels.far.beta / cables).seconds(sent)
    return max(busy, others * first * link.beta + own) + adding(collective, (nodes - 1) * part, levels.gamma)


def predict(collective: str, size: float, levels: Levels) -> dict[Choice, float]:
    """Seconds of every way to do `collective` with a buffer of `size` bytes. KeyError for another collective."""
    known = {"all_to_all": ("exchange",), "all_reduce": FLAT}.get(collective, FLAT[:3])
    ways = {Choice(two_level=False, algorithm=name): flat(collective, name, size, levels) for name in known}
    if min(levels.each, levels.size) > 1:
        both = [name for name in known if name != "tree"]
        ways |= {Choice(two_level=True, algorithm=name): two_level(collective, name, size, levels) for name in both}
    return ways


def choose(collective: str, size: float, levels: Levels) -> Choice:
    """The way that is predicted to take least."""
    ways = predict(collective, size, levels)
    return min(ways, key=lambda way: ways[way])
