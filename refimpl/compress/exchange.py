"""How the ranks of a group form the mean of one flat tensor [n] that travels compressed: who sends what to whom.

N ranks, W(n) the wire bytes of n numbers; a rank sends

    Gathered    (N-1) W(n)            every rank's wire to every rank
    Scattered   (N-1) W(n/N)          chunk i of every rank to rank i, which has the mean of it: a reduce-scatter
    Served      2 (N-1) W(n/N)        then each rank compresses its mean once more, for all: an all-reduce
    Summed      2 W(n) (N-1)/N        an all-reduce of the wires, where they may be added (`linear`)

Everywhere the wires are decompressed, then added in rank order and divided once: codes of different scales have no sum.
Who compresses has an `ErrorFeedback`, in `Served` also whoever serves a chunk. Served: Tang et al. 2021,
arXiv:2102.02888, figure 3; DeepSpeed until 0.19.6: deepspeed/runtime/comm/compressed.py.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from refimpl.comm.collectives import sent_in_all_reduce
from refimpl.comm.group import Group
from refimpl.comm.work import Steps, Work
from refimpl.compress.compressor import Compressor, Wire, pack, unpack
from refimpl.compress.feedback import ErrorFeedback

Op = Literal["sum", "mean"]


class Exchange(ABC):
    """The mean over the ranks of `group` of one tensor [n], call after call. All ranks call alike.

    `feedback` False leaves errors out, for unbiased compressors. `chunks`: how many of the n numbers each rank is
    responsible for, in `Scattered` and `Served`; equal parts by default. `dtype`: of values on the wire, where the
    compressor sends values.
    """

    def __init__(
        self,
        group: Group,
        compressor: Compressor,
        n: int,
        feedback: bool = True,
        chunks: list[int] | None = None,
        dtype: torch.dtype = torch.float32,
        tag: str = "gradients",
    ) -> None:
        if chunks is not None and (len(chunks) != group.size or sum(chunks) != n):
            raise ValueError(f"chunks {chunks}: they must be {group.size}, with the sum {n}")
        self.group, self.compressor, self.n, self.feedback = group, compressor, n, feedback
        self.chunks = chunks if chunks is not None else equal_chunks(n, group.size)
        self.dtype, self.tag, self.turn = dtype, tag, 0
        self.worker = [ErrorFeedback(compressor, length, group.device) for length in self.pieces()] if feedback else []
        self.server: ErrorFeedback | None = None

    def mean(self, x: Tensor, out: Tensor, op: Op = "mean") -> Work:
        """Begin: x [n] of every rank -> out, fp32, once the work is done: their mean [n], or what `out_numel` says.

        x may be changed as soon as this returns. A second transfer, if there is one, starts when the first is waited
        for: wait in the same order on all ranks.
        """
        if x.shape != (self.n,) or out.shape != (self.out_numel(),) or out.dtype != torch.float32:
            raise ValueError(
                f"{type(self).__name__} of [{self.n}]: x has {list(x.shape)}; out has {list(out.shape)} {out.dtype}, "
                f"and must have [{self.out_numel()}] fp32"
            )
        if not self.n:
            return Work()
        work = Work(self.steps(x.detach(), out, op))  # which compresses x before it returns
        self.turn += 1
        return work

    @abstractmethod
    def steps(self, x: Tensor, out: Tensor, op: Op) -> Steps:
        """The transfers and what follows them. x is not looked at after the first."""

    @abstractmethod
    def sent_bytes(self) -> int:
        """What this rank sends in a call."""

    def pieces(self) -> list[int]:
        """Lengths of what is compressed apart."""
        return [self.n]

    def out_numel(self) -> int:
        return self.n

    def compress(self, x: Tensor) -> list[Wire]:
        """x [n] -> a wire for each piece, errors included."""
        turn = self.draw(self.turn)
        parts = x.split(self.pieces())  # type: ignore[no-untyped-call]
        if self.feedback:
            return [w.compress(part, turn, self.dtype) for w, part in zip(self.worker, parts, strict=True)]
        return [self.compressor.compress(part.to(self.dtype), turn) for part in parts]

    def draw(self, turn: int, serving: bool = False) -> int:
        """Ranks draw together where wires are added, else each for itself, and anew for what it serves.

        Rounded a second time by the same draw, an unbiased mean would be biased: by 0.01 of its scale in int4.
        """
        return turn if self.compressor.linear else (2 * turn + serving) * self.group.size + self.group.rank

    def add_up(self, wires: list[Wire], out: Tensor, op: Op, turn: int) -> None:
        """The ranks' wires of this turn -> out: their mean or sum, in rank order."""
        out.zero_()
        for wire in wires:
            if len(out):
                self.compressor.add_to(out, wire, turn=turn)
        if op == "mean":
            out.div_(len(wires))

    def reduced_bytes(self, n: int, dtype: torch.dtype) -> int:
        """What this rank sends in an all-reduce."""
        return sent_in_all_reduce(n, self.group.rank, self.group.size) * dtype.itemsize

    def message_bytes(self, n: int) -> int:
        return self.compressor.wire_bytes(n, self.dtype)

    def read(self, message: Tensor, n: int) -> Wire:
        """The wire of n numbers at the beginning of a message."""
        return unpack(message, self.compressor.layout(n, self.dtype))

    def states(self) -> list[ErrorFeedback]:
        """Every error that this rank keeps: its own, then what it lost as a server."""
        return [*self.worker, *([self.server] if self.server else [])]

    def accept(self) -> None:
        """What was received since the last `accept` has been used."""
        for state in self.states():
            state.accept()

    def revert(self, start: int = 0, end: int | None = None) -> None:
        """Nobody will use numbers start to end of what was received since the last `accept`: undo their errors."""
        for at, state in self.placed():
            low, high = max(start - at, 0), state.n if end is None else min(end - at, state.n)
            if low < high:
                state.revert(low, high)

    def rescale(self, factor: float) -> None:
        """x is measured in another unit from now on: another loss scale."""
        for state in self.states():
            state.rescale(factor)

    def placed(self) -> Iterator[tuple[int, ErrorFeedback]]:
        """Every error, and where in x it begins."""
        at = 0
        for state in self.worker:
            yield at, state
            at += state.n
        if self.server:
            yield sum(self.chunks[: self.group.rank]), self.server

    def tensors(self) -> list[Tensor]:
        """The memory that is kept between calls."""
        return [tensor for state in self.states() for tensor in state.tensors()]


class Gathered(Exchange):
    """Every rank's wire to every rank."""

    def steps(self, x: Tensor, out: Tensor, op: Op) -> Steps:
        mine, turn = pack(self.compress(x)[0], self.group.device), self.turn
        all_ = mine.new_empty(self.group.size * len(mine))
        yield lambda: [self.group.all_gather(all_, mine, async_op=True, tag=self.tag)]
        self.add_up([self.read(message, self.n) for message in all_.chunk(self.group.size)], out, op, turn)

    def sent_bytes(self) -> int:
        return (self.group.size - 1) * self.message_bytes(self.n)


class Summed(Exchange):
    """The wires are added on their way: an all-reduce. ValueError where wires may not be added."""

    def __init__(self, group: Group, compressor: Compressor, n: int, *args: Any, **options: Any) -> None:
        if not compressor.linear:
            raise ValueError(f"{type(compressor).__name__}: the sum of its wires is not the wire of the sum")
        super().__init__(group, compressor, n, *args, **options)

    def steps(self, x: Tensor, out: Tensor, op: Op) -> Steps:
        (wire,), turn = self.compress(x), self.turn
        yield lambda: [self.group.all_reduce(part, op, async_op=True, tag=self.tag) for part in wire]
        self.add_up([wire], out, "sum", turn)

    def sent_bytes(self) -> int:
        return sum(self.reduced_bytes(length, dtype) for length, dtype in self.compressor.layout(self.n, self.dtype))


class Scattered(Exchange):
    """Chunk i of every rank to rank i, whose out is the mean of chunk i."""

    def pieces(self) -> list[int]:
        return self.chunks

    def out_numel(self) -> int:
        return self.chunks[self.group.rank]

    def steps(self, x: Tensor, out: Tensor, op: Op) -> Steps:
        yield from self.scatter(self.compress(x), out, op)

    def scatter(self, wires: list[Wire], mean: Tensor, op: Op) -> Steps:
        size, n, turn = self.group.size, len(mean), self.turn
        there = [self.message_bytes(length) for length in self.chunks]
        here = [there[self.group.rank]] * size
        sent = torch.cat([pack(wire, self.group.device) for wire in wires])
        received = sent.new_empty(sum(here))
        splits = {"in_splits": there, "out_splits": here}
        yield lambda: [self.group.all_to_all(received, sent, **splits, async_op=True, tag=self.tag)]
        self.add_up([self.read(message, n) for message in received.chunk(size)] if n else [()] * size, mean, op, turn)

    def sent_bytes(self) -> int:
        return sum(self.message_bytes(length) for i, length in enumerate(self.chunks) if i != self.group.rank)


class Served(Scattered):
    """Chunk i of every rank to rank i, which compresses the mean of it for all, with an error of its own.

    The second message is as long as the longest chunk's.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.feedback:
            self.server = ErrorFeedback(self.compressor, self.chunks[self.group.rank], self.group.device)

    def out_numel(self) -> int:
        return self.n

    def steps(self, x: Tensor, out: Tensor, op: Op) -> Steps:
        wires, turn, size = self.compress(x), self.turn, self.group.size
        mean = torch.empty(self.chunks[self.group.rank], device=self.group.device)
        yield from self.scatter(wires, mean, op)
        draw = self.draw(turn, serving=True)
        wire = (
            self.server.compress(mean, draw, self.dtype)
            if self.server
            else self.compressor.compress(mean.to(self.dtype), draw)
        )
        mine = torch.zeros(self.message_bytes(max(self.chunks)), dtype=torch.uint8, device=self.group.device)
        message = pack(wire, self.group.device)
        mine[: len(message)] = message
        all_ = mine.new_empty(size * len(mine))
        yield lambda: [self.group.all_gather(all_, mine, async_op=True, tag=self.tag)]
        for part, message in zip(out.split(self.chunks), all_.chunk(size), strict=True):  # type: ignore[no-untyped-call]
            self.add_up([self.read(message, len(part))], part, "sum", turn)

    def sent_bytes(self) -> int:
        return super().sent_bytes() + (self.group.size - 1) * self.message_bytes(max(self.chunks))


def equal_chunks(n: int, size: int) -> list[int]:
    """n numbers in `size` parts of ceil(n / size), the last ones shorter or empty."""
    most = -(-n // size)
    return [min(most, max(0, n - rank * most)) for rank in range(size)]
