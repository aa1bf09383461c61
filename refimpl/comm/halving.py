"""Recursive halving and doubling: partners ever nearer, half of what is left in each message, log2 N messages.

Where a ring hands 1/N of the buffer to its neighbour N-1 times, here a rank sends half of its blocks to the rank N/2
further on, then a quarter to the one N/4 further, and so on. Rank r writes its blocks down from its own on, r, r+1, ...
(mod N). In a round it keeps the first half and sends the rest, which is the first half of the rank that far away:

    4 ranks, rank 0     0   1   2   3           round 1, 2 further: send 2 3, get 0 1 of rank 2
                        0   1                   round 2, 1 further: send 1,   get 0 of rank 3
                        0                       complete

With 2^k ranks this is the recursive halving of Thakur, Rabenseifner & Gropp 2005 (IJHPCA 19(1)), on a
circle instead of a hypercube; the circle does as well with any number of ranks, odd ones too, if what is kept is
rounded up (Traeff 2024, arXiv:2410.14234), where theirs sends the whole buffer once more. An all-gather runs the rounds
backwards, doubling.

Traffic a rank:  reduce_scatter n(N-1)/N, all_gather n(N-1)/N, all_reduce 2n(N-1)/N: the ring's.
Time (alpha: seconds a message, beta: seconds a byte, gamma: seconds a byte added):

    reduce_scatter   ceil(log2 N) alpha + n(N-1)/N (beta + gamma)
    all_gather       ceil(log2 N) alpha + n(N-1)/N beta
    all_reduce       the two together

What it costs: the largest messages go furthest, where links are slowest and shared (see `hierarchy.py`), and the blocks
of one message must lie together, which takes a copy of the buffer.

Order of the sum. Block b is added up in a tree: with 4 ranks (g_b + g_b-2) + (g_b-1 + g_b-3). So each block starts at
another rank, as in the ring, but a number goes through log2 N additions, not N-1: less is rounded off. All ranks get
the same bits. In bf16 and fp16 each round rounds to the wire's dtype.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from refimpl.comm import checks
from refimpl.comm.collectives import Op, combine, divide
from refimpl.comm.group import Group


def all_reduce(group: Group, x: Tensor, op: Op = "sum") -> None:
    """Replace x [n], contiguous, by its sum, mean or maximum over ranks. Any n: blocks may differ by one element."""
    checks.reduction("halving all_reduce", op, x, x)
    chunks = x.detach().view(-1).tensor_split(group.size)
    blocks = Blocks(group, chunks)
    blocks.reduce(op)
    blocks.gather()
    blocks.write(chunks)


def reduce_scatter(group: Group, out: Tensor, x: Tensor, op: Op = "sum") -> None:
    """x [N*s] on every rank -> out [s]: this rank's chunk of the sum, mean or maximum. x is only read, but for `out`.

    ValueError if x is not N times as long as out.
    """
    checks.parts("halving reduce_scatter", group.rank, group.size, whole=x, part=out)
    checks.reduction("halving reduce_scatter", op, x, out)
    blocks = Blocks(group, x.detach().view(group.size, -1).unbind())
    blocks.reduce(op)
    out.detach().copy_(blocks.first(1).view_as(out))


def all_gather(group: Group, out: Tensor, x: Tensor) -> None:
    """x [s] on every rank -> out [N*s] in rank order. x may be out's own chunk.

    ValueError if out is not N times as long as x.
    """
    checks.parts("halving all_gather", group.rank, group.size, whole=out, part=x)
    checks.tensors("halving all_gather", x=x, out=out)
    chunks = out.detach().view(group.size, -1).unbind()
    chunks[group.rank].copy_(x.detach().view(-1))
    blocks = Blocks(group, chunks)
    blocks.gather()
    blocks.write(chunks)


def rounds(size: int) -> Iterator[tuple[int, int]]:
    """(blocks that are kept, blocks that there were) of each round, until one is left; the partner is `kept` away.

    5 ranks: (3, 5), (2, 3), (1, 2).
    """
    there = size
    while there > 1:
        kept = (there + 1) // 2
        yield kept, there
        there = kept


class Blocks:
    """A copy of all blocks, this rank's own first, then those of the ranks after it: a message is one piece of it."""

    def __init__(self, group: Group, chunks: Sequence[Tensor]) -> None:
        self.group = group
        turned = [*chunks[group.rank :], *chunks[: group.rank]]
        self.memory = torch.cat(turned)
        self.ends = [0]  # block i lies between ends[i] and ends[i + 1]
        for chunk in turned:
            self.ends.append(self.ends[-1] + chunk.numel())

    def first(self, stop: int, start: int = 0) -> Tensor:
        """Blocks start to stop."""
        return self.memory[self.ends[start] : self.ends[stop]]

    def reduce(self, op: Op) -> None:
        """Block 0 becomes complete, the others are used up."""
        rank, ranks = self.group.rank, self.group.size
        for kept, there in rounds(ranks):
            mine = self.first(there - kept)
            arriving = torch.empty_like(mine)
            away = self.first(there, start=kept)
            self.group.send_recv(away, (rank + kept) % ranks, arriving, (rank - kept) % ranks, tag="halving")
            combine(mine, arriving, op)
        divide(self.first(1), ranks, op)

    def gather(self) -> None:
        """Block 0 of every rank is complete -> all blocks are."""
        rank, ranks = self.group.rank, self.group.size
        for kept, there in reversed(list(rounds(ranks))):
            known, missing = self.first(there - kept), self.first(there, start=kept)
            self.group.send_recv(known, (rank - kept) % ranks, missing, (rank + kept) % ranks, tag="doubling")

    def write(self, chunks: Sequence[Tensor]) -> None:
        """Back to where the blocks came from."""
        for i in range(len(chunks)):
            chunks[(self.group.rank + i) % len(chunks)].copy_(self.first(i + 1, start=i))
