"""Ring collectives written from send and recv: a rank talks only to its two neighbours, and every link is busy.

Cut the buffer of n bytes into N chunks. In each step every rank sends one chunk to its right and receives one from its
left, so all N links are busy at once. Four ranks, the way of chunk 0 (reduce-scatter, then all-gather):

        +------> rank 1 ------+         step 0   rank 1 sends  g1                 to rank 2
        |                     v         step 1   rank 2 sends  g1+g2              to rank 3
      rank 0                rank 2      step 2   rank 3 sends  (g1+g2)+g3         to rank 0
        ^                     |                  rank 0 holds  ((g1+g2)+g3)+g0:   chunk 0 is complete
        +------- rank 3 <-----+         step 3, 4, 5   it travels once more round the ring, now copied, not added

Chunk c starts one rank later than chunk c-1 and ends at rank c, so in any one step the ranks send N different chunks.

Traffic a rank:  reduce_scatter n(N-1)/N, all_gather n(N-1)/N, all_reduce 2n(N-1)/N: for large N a rank sends its buffer
twice however many ranks there are. No algorithm sends less (Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce
algorithms for clusters of workstations", JPDC 69(2)).
Time (alpha: seconds a message, beta: seconds a byte, gamma: seconds a byte added):

    reduce_scatter  (N-1) (alpha + n/N (beta + gamma))
    all_gather      (N-1) (alpha + n/N beta)
    all_reduce      the two together: 2(N-1) alpha + 2n(N-1)/N beta + n(N-1)/N gamma

The price is latency: 2(N-1) messages one after the other, where a tree needs about 2 log2 N. Small buffers want a tree.

Order of the sum. Chunk c is added in the order c+1, c+2, ..., c: each chunk starts at another rank, because that is
what keeps every link busy. Floating-point addition is not associative, so chunk 0 and chunk 1 round differently, and
neither need equal the sum in rank order ((g0+g1)+g2)+g3 of `Group.all_reduce`. All ranks do get the same bits, since
each chunk is summed once and then copied. In bf16 and fp16 each of the N-1 hops rounds the sum to the wire's dtype.
NCCL's ring works like this, with each chunk cut finer so that the steps overlap.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from refimpl.comm import checks
from refimpl.comm.collectives import Op, combine, divide
from refimpl.comm.group import Group


def all_reduce(group: Group, x: Tensor, op: Op = "sum") -> None:
    """Replace x [n], contiguous, by its sum, mean or maximum over ranks. Any n: chunks may differ by one element."""
    checks.reduction("ring all_reduce", op, x, x)
    chunks = x.detach().view(-1).tensor_split(group.size)  # [n] -> N views of [n/N], rounded up or down
    chunks[group.rank].copy_(_reduce(group, chunks, op))
    _gather(group, chunks)


def reduce_scatter(group: Group, out: Tensor, x: Tensor, op: Op = "sum") -> None:
    """x [N*s] on every rank -> out [s]: this rank's chunk of the sum, mean or maximum.

    x keeps its values, unless `out` is a part of it. ValueError if x is not N times as long as out.
    """
    checks.parts("ring reduce_scatter", group.rank, group.size, whole=x, part=out)
    checks.reduction("ring reduce_scatter", op, x, out)
    reduced = _reduce(group, x.detach().view(group.size, -1).unbind(), op)
    out.detach().copy_(reduced.view_as(out))


def all_gather(group: Group, out: Tensor, x: Tensor) -> None:
    """x [s] on every rank -> out [N*s] in rank order. x may be out's own chunk.

    ValueError if out is not N times as long as x.
    """
    checks.parts("ring all_gather", group.rank, group.size, whole=out, part=x)
    checks.tensors("ring all_gather", x=x, out=out)
    chunks = out.detach().view(group.size, -1).unbind()
    chunks[group.rank].copy_(x.detach().view(-1))
    _gather(group, chunks)


def _reduce(group: Group, chunks: Sequence[Tensor], op: Op) -> Tensor:
    """N chunks -> chunk `rank`, reduced. The partial sums live in buffers of their own."""
    rank, ranks = group.rank, group.size
    partial = chunks[rank - 1]  # Python's -1 is the ring's wrap-around
    for step in range(1, ranks):
        mine = chunks[(rank - 1 - step) % ranks]
        arriving = torch.empty_like(mine)
        _shift(group, partial, arriving)
        partial = combine(arriving, mine, op)
    return divide(partial, ranks, op)


def _gather(group: Group, chunks: Sequence[Tensor]) -> None:
    """Chunk `rank` is complete on rank `rank` -> all N chunks are complete on every rank."""
    rank, ranks = group.rank, group.size
    for step in range(ranks - 1):
        _shift(group, chunks[(rank - step) % ranks], chunks[(rank - step - 1) % ranks])


def _shift(group: Group, to_right: Tensor, from_left: Tensor) -> None:
    """One step of the ring, both ways at once: if every rank sent first and waited, no rank would receive."""
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    group.send_recv(to_right, right, from_left, left, tag="ring")
