"""Which tokens of a sequence a rank has: one run of them, or two, so that causal attention is the same work for all.

A token attends to itself and to those before it, so the last tokens have most to do. With 4 ranks and 8 chunks, a row a
chunk of queries, # a chunk of keys to look at, \\ half of one; the rank that has the queries stands in front:

    contiguous              zigzag
    0  \\                    0  \\
    0  # \\                  1  # \\
    1  # # \\                2  # # \\
    1  # # # \\              3  # # # \\
    2  # # # # \\            3  # # # # \\
    2  # # # # # \\          2  # # # # # \\
    3  # # # # # # \\        1  # # # # # # \\
    3  # # # # # # # \\      0  # # # # # # # \\

Contiguous, the last of N ranks has (2N - 1)/N times the mean; zigzag, each has exactly the mean: chunk i and chunk
2N - 1 - i together always see 2N - 1 chunks and two halves. Llama 3 is trained so: Llama team 2024, arXiv:2407.21783,
section 3.3.2. Striped attention gives a rank every N-th token instead: Brandon et al. 2023, arXiv:2311.09431.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Run:
    """Tokens `start` to `end` of the sequence, which lie from `at` on in what the rank has."""

    start: int
    end: int
    at: int

    @property
    def here(self) -> slice:
        return slice(self.at, self.at + self.end - self.start)


@dataclass(frozen=True)
class Layout:
    """Tokens 0 to `length` of a sequence, cut for `ranks`: one run each, or two with `zigzag`."""

    length: int
    ranks: int
    zigzag: bool = False

    def __post_init__(self) -> None:
        chunks = (1 + self.zigzag) * self.ranks
        if self.length < 1 or self.length % chunks:
            raise ValueError(
                f"a sequence of {self.length} tokens does not divide into {chunks} chunks for {self.ranks} ranks: pad "
                f"it to {max(1, -(-self.length // chunks)) * chunks}"
            )

    @property
    def here(self) -> int:
        """Tokens of a rank."""
        return self.length // self.ranks

    def runs(self, rank: int) -> list[Run]:
        """A rank's tokens, in order."""
        if not self.zigzag:
            return [Run(rank * self.here, (rank + 1) * self.here, 0)]
        size, last = self.here // 2, 2 * self.ranks - 1 - rank
        return [Run(rank * size, (rank + 1) * size, 0), Run(last * size, (last + 1) * size, size)]

    def positions(self, rank: int) -> Tensor:
        """-> [here] int64: where each of a rank's tokens stands in the sequence."""
        return torch.cat([torch.arange(run.start, run.end) for run in self.runs(rank)])

    def cut(self, x: Tensor, rank: int, dim: int = 1) -> Tensor:
        """A rank's part of x, which has the sequence's tokens along `dim`."""
        return torch.cat([x.narrow(dim, run.start, run.end - run.start) for run in self.runs(rank)], dim)

    def join(self, parts: list[Tensor], dim: int = 1) -> Tensor:
        """The inverse of `cut`: from every rank's part."""
        runs = [(run, part) for rank, part in enumerate(parts) for run in self.runs(rank)]
        runs.sort(key=lambda pair: pair[0].start)
        return torch.cat([part.narrow(dim, run.at, run.end - run.start) for run, part in runs], dim)

    def pairs(self, queries: int, keys: int, causal: bool) -> Iterator[tuple[Run, Run, bool]]:
        """(run of rank `queries`, run of rank `keys`, whether only on and below the diagonal) where there is work."""
        for q in self.runs(queries):
            for k in self.runs(keys):
                if not causal or k.end <= q.start:
                    yield q, k, False
                elif k.start == q.start:
                    yield q, k, True

    def block(self, queries: int, keys: int, causal: bool) -> tuple[slice, slice, bool] | None:
        """The same as one block: (queries of the one rank, keys of the other, whether only on and below the diagonal).

        Places in what a rank has, which is in order: its own tokens are a square with a diagonal, whatever the runs.
        Of another's, zigzag, a rank sees the first run, with all its queries, or both with those of its second.
        """
        everything, half = slice(0, self.here), self.here // 2
        if not causal or queries == keys:
            return everything, everything, causal
        if keys < queries:
            return everything, slice(0, half) if self.zigzag else everything, False
        return (slice(half, self.here), everything, False) if self.zigzag else None

    def work(self, rank: int, causal: bool = True) -> int:
        """Pairs of a query and a key for which a rank computes a score that counts."""
        count = 0
        for keys in range(self.ranks):
            for q, k, diagonal in self.pairs(rank, keys, causal):
                n = q.end - q.start
                count += n * (n + 1) // 2 if diagonal else n * (k.end - k.start)
        return count
