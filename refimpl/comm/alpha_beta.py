"""What a collective costs, from two numbers a link: alpha, the seconds of an empty message, and beta, those of a byte.

`fit` finds both from measured times by least squares; the formulas predict each algorithm's time where all links are
alike. `level_model.py` does where some are nearer than others.

    n bytes, N ranks            reduce-scatter or all-gather                  all-reduce
    exchange                    alpha + n(N-1)/N beta                         both halves
    ring                        (N-1) alpha + n(N-1)/N beta                   both halves
    halving, doubling           ceil(log2 N) alpha + n(N-1)/N beta            both halves
    double binary tree, k pieces                                              2(h+k-1) (alpha + n/k beta)

and gamma a byte for what a rank adds: n(N-1)/N in a reduce-scatter, n in a tree. "Exchange" is what `Group` does over
messages: all at once, chunk i to rank i, so their latencies overlap.

Hockney 1994 (Parallel Computing 20(3)) for alpha and beta; Thakur, Rabenseifner & Gropp 2005 (IJHPCA 19(1)) for
the formulas; Sanders, Speck & Traeff 2009 for the two trees. NCCL: src/graph/tuning.cc has such a table.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from refimpl.comm.tree import height

HALVES = {"reduce_scatter": 1, "all_gather": 1, "all_reduce": 2, "all_to_all": 1}


@dataclass(frozen=True)
class AlphaBeta:
    """A link. alpha: seconds a message; beta: seconds a byte."""

    alpha: float
    beta: float

    def seconds(self, size: float) -> float:
        """Of one message of `size` bytes."""
        return self.alpha + size * self.beta


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
    seconds = HALVES[collective] * (steps(algorithm, ranks) * link.alpha + share * link.beta)
    return seconds + adding(collective, share, gamma)


def adding(collective: str, size: float, gamma: float) -> float:
    """Seconds of the additions, if the collective has any."""
    return size * gamma if collective in ("reduce_scatter", "all_reduce") else 0.0
