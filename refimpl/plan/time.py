"""Seconds from the alpha-beta model: a message costs alpha for being sent, and beta for each of its bytes.

Thakur, Rabenseifner & Gropp 2005, "Optimization of collective communication operations in MPICH", IJHPCA 19(1).
The bandwidth of a link is 1 / beta.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """One rank's connection. alpha: seconds a message; bandwidth: bytes a second in each direction."""

    alpha: float
    bandwidth: float


def ring_all_reduce_seconds(size: float, ranks: int, link: Link) -> float:
    """`size` bytes in 2(N-1) messages of size / N each, one after the other (`refimpl.comm.ring`)."""
    return 2 * (ranks - 1) * (link.alpha + size / ranks / link.bandwidth)


def ring_half_seconds(size: float, ranks: int, link: Link) -> float:
    """A reduce-scatter or an all-gather: half of an all-reduce."""
    return ring_all_reduce_seconds(size, ranks, link) / 2


def tree_all_reduce_seconds(size: float, ranks: int, link: Link) -> float:
    """One binomial tree, up and down again, the whole buffer on each of 2 ceil(log2 N) hops."""
    return 2 * math.ceil(math.log2(ranks)) * (link.alpha + size / link.bandwidth)


def crossover_bytes(ranks: int, link: Link) -> float:
    """The size at which ring and tree take equally long: below it the tree wins. Infinite if it always does."""
    hops = math.ceil(math.log2(ranks))
    slope = (hops - (ranks - 1) / ranks) / link.bandwidth
    return (ranks - 1 - hops) * link.alpha / slope if slope > 0 else math.inf


def bubble(stages: int, micro_batches: int) -> float:
    """The share of a pipeline step in which a stage idles: (p-1) / (m+p-1). GPipe and 1F1B alike."""
    return (stages - 1) / (micro_batches + stages - 1)


def exposed_seconds(compute: float, communication: float, buckets: int) -> float:
    """What communication adds to a backward of `compute` seconds, cut in equal buckets that travel as they fill.

    The last bucket fills when backward ends, so at least communication / buckets is never hidden.
    """
    finished = 0.0
    for i in range(1, buckets + 1):
        finished = max(finished, compute * i / buckets) + communication / buckets
    return finished - compute


def adam_seconds(parameters: float, bandwidth: float) -> float:
    """One AdamW step in fp32: reads weight, gradient and two moments, writes weight and moments. Memory-bound."""
    return parameters * 4 * (4 + 3) / bandwidth


def checkpoint_interval(write: float, between_failures: float) -> float:
    """Seconds between checkpoints that lose least, when one takes `write` seconds.

    The share lost is write / t + t / (2 MTBF). Young 1974, "A first order approximation to the optimum checkpoint
    interval", CACM 17(9).
    """
    return math.sqrt(2 * write * between_failures)
