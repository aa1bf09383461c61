"""What a collective costs, from two numbers a link: alpha, the seconds of an empty message, and beta, those of a byte.

`fit` finds both from measured times by least squares; the formulas predict each algorithm's time on one level (all
links alike) and on two (L ranks a node, F nodes, one cable a node); `choose` takes the least.

    n bytes, N ranks            reduce-scatter or all-gather                  all-reduce
    exchange                    alpha + n(N-1)/N beta                         both halves
    ring                        (N-1) alpha + n(N-1)/N beta                   both halves
    halving, doubling           ceil(log2 N) alpha + n(N-1)/N beta            both halves
    double binary tree, k pieces                                              2(h+k-1) (alpha + n/k beta)

and gamma a byte for what a rank adds: n(N-1)/N in a reduce-scatter, n in a tree. "Exchange" is what `Group` does over
messages: all at once, chunk i to rank i, so their latencies overlap.

On two levels a round is over with its slowest message. A ring has one rank a node that sends far, N - 1 times; while
one chunk is late by alpha, it sends the next. So a half takes the cable's time, n(N-1)/N beta and one alpha, or that of
a chunk on its way round, which crosses on one hop of L and waits for all of these alphas: whichever is more. A round of
halving that sends s ranks further has min(s, L) that send far, an exchange all L: these share the cable (or,
`pairwise`, those between the same two nodes do). How much, is measured too: `crowd` is the far beta with all ranks of a
node sending, over that of one alone; L if they share one cable, 1 if each has its own.

Hockney 1994 (Parallel Computing 20(3)) for alpha and beta; Thakur, Rabenseifner & Gropp 2005 (IJHPCA 19(1)) for
the formulas; Sanders, Speck & Traeff 2009 for the two trees. NCCL: src/graph/tuning.cc has such a table.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from refimpl.comm.halving import rounds
from refimpl.comm.tree import height, places

HALVES = {"reduce_scatter": 1, "all_gather": 1, "all_reduce": 2, "all_to_all": 1}
FLAT = ("exchange", "ring", "halving", "tree")


@dataclass(frozen=True)
class AlphaBeta:
    """A link. alpha: seconds a message; beta: seconds a byte."""

    alpha: float
    beta: float

    def seconds(self, size: float) -> float:
        """Of one message of `size` bytes."""
        return self.alpha + size * self.beta


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


def fit(sizes: Sequence[float], seconds: Sequence[float]) -> AlphaBeta:
    """The alpha and beta of t = alpha + beta n that come nearest to the measured times, neither of them below 0.

    Least squares of the relative errors: else the times of large messages alone would count, and say nothing of alpha.
    ValueError without two different sizes, or for a time that is not above 0.
    """
    if len(sizes) != len(seconds) or len(set(sizes)) < 2 or min(seconds) <= 0:
        raise ValueError(f"fit: needs times above 0 of two sizes or more, not {list(sizes)} bytes in {list(seconds)} s")
    w = [1 / t**2 for t in seconds]
    one, n, nn = (sum(a * b**k for a, b in zip(w, sizes, strict=True)) for k in (0, 1, 2))
    t = sum(a * b for a, b in zip(w, seconds, strict=True))
    nt = sum(a * b * c for a, b, c in zip(w, sizes, seconds, strict=True))
    beta = (one * nt - n * t) / (one * nn - n * n)
    if beta < 0:
        return AlphaBeta(t / one, 0.0)
    alpha = (t - beta * n) / one
    return AlphaBeta(alpha, beta) if alpha >= 0 else AlphaBeta(0.0, nt / nn)


def steps(algorithm: str, ranks: int) -> int:
    """Messages one after another in a reduce-scatter or an all-gather. KeyError for another algorithm."""
    return {"exchange": int(ranks > 1), "ring": ranks - 1, "halving": (ranks - 1).bit_length()}[algorithm]


def pieces(size: float, ranks: int, link: AlphaBeta) -> int:
    """In how many pieces a tree's halves are best cut: sqrt((h - 1) n beta / alpha), at least 1."""
    best = (height(ranks) - 1) * size * link.beta / link.alpha if link.alpha else 1.0
    return max(1, round(math.sqrt(best))) if ranks > 1 else 1


def one_level(collective: str, algorithm: str, size: float, ranks: int, link: AlphaBeta, gamma: float = 0.0) -> float:
    """Seconds where all links are alike; `size`: bytes of the whole buffer. KeyError if the algorithm cannot do it."""
    if ranks == 1:
        return 0.0
    if algorithm == "tree" and collective == "all_reduce":
        k = pieces(size, ranks, link)
        stages = height(ranks) + k - 1
        return 2 * stages * link.seconds(size / k) + stages * size / k * gamma
    share = size * (ranks - 1) / ranks
    added = share * gamma if collective in ("reduce_scatter", "all_reduce") else 0.0
    return HALVES[collective] * (steps(algorithm, ranks) * link.alpha + share * link.beta) + added


def flat(collective: str, algorithm: str, size: float, levels: Levels) -> float:
    """Seconds of one algorithm among all ranks, numbered node by node: each round takes its slowest message."""
    ranks, part = levels.ranks, size / levels.ranks
    if levels.size == 1:
        return one_level(collective, algorithm, size, ranks, levels.near, levels.gamma)
    if algorithm == "tree":  # all levels counted as far; a cable carries more than one half if several edges use it
        far = levels.cable(1)
        return one_level(
            collective,
            algorithm,
            size,
            ranks,
            AlphaBeta(far.alpha, far.beta * max(1.0, edges(levels) / 2)),
            levels.gamma,
        )

    def slowest(bytes_near: float, bytes_far: float, senders: int) -> float:
        near = levels.near.seconds(bytes_near) if bytes_near else 0.0
        return max(near, levels.cable(senders).seconds(bytes_far))

    if algorithm == "exchange":
        half = slowest((levels.each - 1) * part, (ranks - levels.each) * part / levels.cables, levels.each)
    elif algorithm == "ring":
        crossing, inside = levels.cable(1).seconds(part), levels.near.seconds(part) if levels.each > 1 else 0.0
        across = hops(levels)
        busy = crossing + (ranks - 2) * part * levels.cable(1).beta
        half = max(busy, across * crossing + (ranks - 1 - across) * inside, (ranks - 1) * inside)
    else:
        half = sum(
            slowest((there - kept) * part if kept < levels.each else 0.0, (there - kept) * part, senders(levels, kept))
            for kept, there in rounds(ranks)
        )
    added = part * (ranks - 1) * levels.gamma if collective in ("reduce_scatter", "all_reduce") else 0.0
    return HALVES[collective] * half + added


def senders(levels: Levels, shift: int) -> int:
    """Ranks that use one cable at once, at most, when every rank sends to the one `shift` further on."""
    each, ranks = levels.each, levels.ranks
    away = [(rank // each, (rank + shift) % ranks // each) for rank in range(ranks)]
    return max(Counter(pair if levels.pairwise else pair[0] for pair in away if pair[0] != pair[1]).values())


def hops(levels: Levels) -> int:
    """How often a chunk that goes round the ring once, N - 1 hops, crosses from node to node: (N-1)F/N, rounded up."""
    return -(-(levels.ranks - 1) * levels.size // levels.ranks)


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
    cable, each = levels.cable(levels.each), levels.each
    if collective == "all_to_all":
        inside = levels.size * one_level("all_to_all", "exchange", size / levels.size, each, levels.near)
        cable = AlphaBeta(cable.alpha, cable.beta / levels.cables)
        return inside + one_level("all_to_all", "exchange", size, levels.size, cable)
    if algorithm == "exchange":
        cable = AlphaBeta(cable.alpha, cable.beta / levels.cables)
    outside = one_level(collective, algorithm, size / each, levels.size, cable, levels.gamma)
    if collective == "all_reduce":
        return one_level("all_reduce", algorithm, size, each, levels.near, levels.gamma) + outside
    row = one_level(collective, algorithm, size / levels.size, each, levels.near, levels.gamma)
    return levels.size * row + outside


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
