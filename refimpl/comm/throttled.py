"""Collectives over a slow link: those of `Composed`, each made of messages between two ranks, which cables carry.

    all_reduce       chunk i of each rank to rank i, added there in rank order; each sum from its rank to all others
    reduce_scatter   the first half of it
    all_gather       from each rank to all others
    all_to_all       its parts
    broadcast        from the root to all others

So a rank sends each other one n/N in a half: over the cable between two nodes of m ranks go m*m of these each way. The
bits are those of any other way. The bytes themselves go through memory where the ranks share it, else by gloo.
"""

import ctypes
import math
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from refimpl.comm.composed import Composed
from refimpl.comm.link import COLLECTIVE, MESSAGE, Cables
from refimpl.comm.streams import Streams
from refimpl.comm.transport import Library
from refimpl.comm.work import Phase, Steps

SLICE = 1_000_000  # ns that a rank sleeps before it looks after other collectives of its own
EARLY = 100_000  # ns before a message is due that a rank stops sleeping, and lets others run: sleeps end late
_TIMERSLACK = 29  # of <linux/prctl.h>
Bytes = Mapping[int, int]  # member -> bytes to it, or from it


class Throttled(Composed):
    """`way`: how the bytes themselves go, memory that the ranks share or gloo."""

    def __init__(self, way: Library, cables: Cables, backend: str, streams: Streams) -> None:
        super().__init__(way.handle, backend, streams)
        self.way, self.cables = way, cables
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_TIMERSLACK, 1, 0, 0, 0)  # ns that this thread's sleeps may be late: not 50 us

    def start(self, transfer: Any, *args: Any, **options: Any) -> list[Any]:
        if transfer is dist.broadcast:
            x, root = args[0], options["group_src"]
            others = {member: x.nbytes for member in range(self.size) if member != self.rank}
            sent, received = (others, {}) if root == self.rank else ({}, {root: x.nbytes})
            steps = self.way.broadcast(x, root)
        else:
            out, x, out_splits, in_splits = args
            sent, received = _bytes(x, in_splits, self.size), _bytes(out, out_splits, self.size)
            steps = self.way.all_to_all(out, x, out_splits, in_splits)
        return self._cross(COLLECTIVE, sent, received, next(steps))

    def send(self, x: Tensor, to: int) -> Steps:
        return self._message(self.way.send(x, to), {to: x.nbytes}, {})

    def recv(self, x: Tensor, source: int) -> Steps:
        return self._message(self.way.recv(x, source), {}, {source: x.nbytes})

    def send_recv(self, x: Tensor, to: int, out: Tensor, source: int) -> Steps:
        steps = self.way.send_recv(x, to, out, source)
        return self._message(steps, {to: x.nbytes}, {source: out.nbytes})

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.way.empty(numel, dtype, device)

    def trim(self) -> None:
        super().trim()
        self.way.trim()

    def scratch(self) -> list[Tensor]:
        return [*super().scratch(), *self.way.scratch()]

    def advance(self) -> None:
        self.way.advance()

    def _message(self, steps: Steps, sent: Bytes, received: Bytes) -> Steps:
        called = time.monotonic_ns()
        return (partial(self._cross, MESSAGE, sent, received, phase, called) for phase in steps)

    def _cross(self, kind: int, sent: Bytes, received: Bytes, begin: Phase, called: int | None = None) -> list[Any]:
        """Put on the cables what goes over them, then begin it."""
        called = time.monotonic_ns() if called is None else called
        left, arrivals = self.cables.send(kind, sent, called), self.cables.expect(kind, received)
        handles = begin()
        return [Crossing(self, handles, left, arrivals)] if left or arrivals else handles


class Crossing:
    """Transfers under way, of which some must leave on cables, until `left`, or arrive, when the words say."""

    def __init__(self, transport: Throttled, handles: list[Any], left: int, arrivals: list[int]) -> None:
        self.transport, self.handles, self.left, self.arrivals = transport, handles, left, arrivals

    def wait(self, limit: timedelta | None = None) -> None:
        """As torch's: RuntimeError if it is not over within the limit, and may be waited for again."""
        end = math.inf if limit is None else time.monotonic_ns() + limit.total_seconds() * 1e9
        for handle in self.handles:
            handle.wait() if limit is None else handle.wait(limit)
        due, begun = self._due(), time.monotonic_ns()
        self.travel(due, end)
        self.transport.cables.waited(max(due, begun))

    def travel(self, due: int, end: float) -> None:
        """Sleep until `due`. RuntimeError at `end`. A rank that is in here waits for no other: see `ranks/hang.py`."""
        while (now := time.monotonic_ns()) < due:
            if now >= end:
                raise RuntimeError("the messages have not arrived yet")
            time.sleep(max(0, min(due - EARLY, now + SLICE, end) - now) / 1e9)
            self.transport.advance()

    def is_completed(self) -> bool:
        return all(handle.is_completed() for handle in self.handles) and time.monotonic_ns() >= self._due()

    def _due(self) -> int:
        return max(self.left, self.transport.cables.due(self.arrivals))


def _bytes(x: Tensor, splits: Sequence[int] | None, size: int) -> dict[int, int]:
    """Of the rows of x, for each member."""
    if splits is None:
        return dict.fromkeys(range(size), x.nbytes // size)
    row = x.nbytes // max(1, x.shape[0])
    return {member: rows * row for member, rows in enumerate(splits)}
