"""A group of N ranks in one process, on one GPU: each of the others is this rank's twin and sends what this one sends.

So what a collective delivers is known, and it needs no network: on the communication's stream it spins for a random
time, copies, and spins again. `torch.cuda._sleep` keeps one stream busy while the others run on, so a wait that is
missing reads what was there before. That is made visible: NaN is written into every buffer before the collective
writes it, into memory that is taken to be filled, and into memory that was given back.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, UntypedStorage

from refimpl.comm.collectives import Op, Scratch
from refimpl.comm.streams import Streams, lane_of
from refimpl.comm.transport import Transport
from refimpl.comm.work import Steps


class Twins(Transport):
    """Rank `rank` of `size`. `dally()` is called on the communication's stream, before and after each transfer."""

    def __init__(self, rank: int, size: int, streams: Streams, dally: Callable[[], None]) -> None:
        super().__init__(rank, size)
        self.lane, self.dally = lane_of(streams), dally

    def all_reduce(self, x: Tensor, op: Op) -> Steps:
        self.dally()
        result = _reduced([x] * self.size, op)
        poison(x)
        self.dally()
        x.copy_(result)
        self.dally()
        yield from ()

    def reduce_scatter(self, out: Tensor, x: Tensor, op: Op) -> Steps:
        """Twin i sends, for this rank's chunk, its chunk i: so all of x is read."""
        self.dally()
        result = _reduced(list(x.view(self.size, -1).unbind()), op)
        poison(out)
        self.dally()
        out.copy_(result)
        self.dally()
        yield from ()

    def all_gather(self, chunks: list[Tensor], x: Tensor) -> Steps:
        self.dally()
        own = x.clone()
        for chunk in chunks:
            poison(chunk)
        self.dally()
        for chunk in chunks:
            chunk.copy_(own)
        self.dally()
        yield from ()

    def all_to_all(self, out: Tensor, x: Tensor, out_splits: list[int] | None, in_splits: list[int] | None) -> Steps:
        raise NotImplementedError("no stage calls it")

    def broadcast(self, x: Tensor, root: int) -> Steps:
        self.dally()
        own = x.clone()
        poison(x)
        self.dally()
        x.copy_(own)
        yield from ()

    def send(self, x: Tensor, to: int) -> Steps:
        raise NotImplementedError("no stage calls it")

    def recv(self, x: Tensor, source: int) -> Steps:
        raise NotImplementedError("no stage calls it")

    def send_recv(self, x: Tensor, to: int, out: Tensor, source: int) -> Steps:
        raise NotImplementedError("no stage calls it")


def poison(x: Tensor) -> None:
    """NaN in every element; the largest number where there is none."""
    x.fill_(float("nan") if x.is_floating_point() else torch.iinfo(x.dtype).max)


@contextmanager
def poisoned() -> Iterator[None]:
    """Inside, memory is NaN once it was given back, and when a buffer is taken."""
    resize, take = UntypedStorage.resize_, Scratch.take

    def resized(storage: UntypedStorage, size: int) -> Any:
        before, device = storage.nbytes(), storage.device
        result = resize(storage, size)
        if size < before:
            # The allocator hands the block that it got back to the next of this stream that asks for as much.
            torch.empty(before, dtype=torch.uint8, device=device).fill_(0xFF)
        return result

    def taken(scratch: Scratch, numel: int, like: Tensor) -> Tensor:
        buffer = take(scratch, numel, like)
        poison(buffer)
        return buffer

    with mock.patch.object(UntypedStorage, "resize_", resized), mock.patch.object(Scratch, "take", taken):
        yield


def _reduced(rows: list[Tensor], op: Op) -> Tensor:
    stacked = torch.stack(rows)
    if op == "max":
        return stacked.amax(0)
    return stacked.sum(0) if op == "sum" else stacked.mean(0)
