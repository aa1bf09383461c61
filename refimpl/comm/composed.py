"""Collectives composed of simpler ones: a reduction is an exchange and ordered adds, an all-gather N broadcasts.

    all_reduce       exchange -> add in rank order -> all_gather         2n(N-1)/N bytes a rank
    reduce_scatter   exchange -> add in rank order                        n(N-1)/N
    all_gather       broadcast from every rank into its place             n(N-1)/N

See `collectives.py` for why this is faster on gloo than gloo's own, and for the order of the adds.
"""

import torch.distributed as dist
from torch import Tensor

from refimpl.comm import collectives
from refimpl.comm.collectives import Op
from refimpl.comm.streams import Streams
from refimpl.comm.transport import Library
from refimpl.comm.work import Steps


class Composed(Library):
    """gloo's transport; with `deterministic=True` also NCCL's."""

    def __init__(self, handle: dist.ProcessGroup, backend: str, streams: Streams) -> None:
        super().__init__(handle, backend, streams)
        self.in_halves, self._scratch = self.host_waits, collectives.Scratch(streams)

    def all_reduce(self, x: Tensor, op: Op, second: "Composed | None" = None) -> Steps:
        """`second`: what makes the second half, in a group of its own, where another thread starts it."""
        sizes = collectives.chunk_sizes(x.numel(), self.size)
        chunks = list(x.split(sizes))  # type: ignore[no-untyped-call]
        own = chunks[self.rank]
        received = self._scratch.take(own.numel() * (self.size - 1), x)
        yield lambda: collectives.exchange(self.start, received, x, sizes, self.rank)
        rows = collectives.rows_of(received, own, self.rank, self.size)
        collectives.ordered_reduce(own, rows, self.rank, op)
        yield lambda: collectives.all_gather((second or self).start, chunks, own, self.rank)
        self._scratch.give(received)

    def reduce_scatter(self, out: Tensor, x: Tensor, op: Op) -> Steps:
        own = x.view(self.size, -1)[self.rank]
        sizes = [own.numel()] * self.size
        received = self._scratch.take(x.numel() - own.numel(), x)
        yield lambda: collectives.exchange(self.start, received, x, sizes, self.rank)
        rows = collectives.rows_of(received, own, self.rank, self.size)
        collectives.ordered_reduce(out, rows, self.rank, op)
        self._scratch.give(received)

    def all_gather(self, chunks: list[Tensor], x: Tensor) -> Steps:
        yield lambda: collectives.all_gather(self.start, chunks, x, self.rank)

    def trim(self) -> None:
        self._scratch.trim()

    def scratch(self) -> list[Tensor]:
        return self._scratch.tensors()
