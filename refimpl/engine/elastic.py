"""One batch for many numbers of ranks: a job that loses ranks, or is given more, goes on with the batch that it had.

Given are micro-batches m that fit into memory, a largest batch, and a range of ranks. n ranks share a batch B where
B = m x steps x n for one of these m: where n divides B / m. So B / m should have many divisors for its size. A number
with more of them than any smaller one is called highly composite: 1, 2, 4, 6, 12, 24, 36, 48, 60, ... (60 has 12, and
64 has 7). Each m, and the least common multiple of all, is made as large as the largest batch allows by the largest
factor of this kind; of these few batches that one is taken which the most numbers of ranks in the range share.

    m = 8, 12, 16, 17, at most 10,000, on 32 to 1,500 ranks: 9,792 = 17 x 576 = 12 x 816 = ..., 23 numbers share it

The section `elasticity` of the JSON is in `refimpl.engine.configuration.elasticity`. DeepSpeed's file:
elasticity/elasticity.py.
"""

from collections.abc import Iterable, Iterator
from math import lcm

PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47)  # the product with the next is beyond 64 bits


def choose(micro_batches: Iterable[int], most: int, ranks: range, larger: bool) -> tuple[int, list[int]]:
    """(batch, numbers in `ranks` that share it): the most of them; of two with as many the larger batch, or smaller."""
    sizes = set(micro_batches)
    batches = {base * most_divisible(most // base) for base in (*sizes, lcm(*sizes)) if base <= most}
    sharing = {batch: sharers(batch, sizes, ranks) for batch in batches}
    return max(sharing.items(), key=lambda pair: (len(pair[1]), pair[0] if larger else -pair[0]))


def sharers(batch: int, micro_batches: Iterable[int], ranks: range) -> list[int]:
    """The numbers n in `ranks` for which batch = m x steps x n, for one of the micro-batches m."""
    each = {batch // m for m in micro_batches if batch % m == 0}
    return [n for n in range(ranks.start, min(ranks.stop, max(each) + 1)) if any(steps % n == 0 for steps in each)]


def most_divisible(limit: int) -> int:
    """The number up to `limit` with the most divisors, of several the smallest: highly composite."""
    return min(_candidates(limit), key=lambda pair: (-pair[1], pair[0]))[0]


def _candidates(limit: int, primes: tuple[int, ...] = PRIMES, power: int = 64) -> Iterator[tuple[int, int]]:
    """(number, how many divisors) of all products of the first primes with powers that do not grow, up to `limit`.

    Powers that grow would make a larger number with as many divisors: 2 x 9 beside 4 x 3, say 18 and 12, have 6.
    """
    yield 1, 1
    for k in range(1, power + 1):
        if not primes or primes[0] ** k > limit:
            return
        for number, divisors in _candidates(limit // primes[0] ** k, primes[1:], k):
            yield primes[0] ** k * number, (k + 1) * divisors
