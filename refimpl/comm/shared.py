"""Collectives through memory that the ranks of one host share: nothing is sent, each rank reads what its peers have.

    all_reduce       add my chunk of everyone's buffer, in rank order; then copy everyone's finished chunk
    reduce_scatter   add my chunk of everyone's buffer
    all_gather       copy everyone's
    all_to_all, broadcast   copy what is meant for me
    send, recv       the same between two: a send is over when its copy is made, or was read where it lies

A tensor that lies in this rank's mapped memory (`Transport.empty`) is read there by its peers; any other is copied
there first. Either way the caller may write to it when the work is done: peers have read it, or read the copy.
The copy of one call serves a later one when all have read it. Signals travel through memory too (see `signals.py`).
Everything is done by the rank's own thread, or by a helper where that does something else (see `Tasks`).

As NCCL's shared-memory and peer-to-peer transports inside a node (its "SHM" and "P2P" in NCCL_DEBUG=INFO).
"""

import weakref
from collections.abc import Generator, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from refimpl.comm import collectives
from refimpl.comm.board import CollectiveMismatch
from refimpl.comm.collectives import Op, Scratch
from refimpl.comm.mapped import Mapped, Own, Place
from refimpl.comm.patience import SHORT
from refimpl.comm.process_group import limit_of
from refimpl.comm.signals import Channel, Need, Watch, message_words
from refimpl.comm.streams import Streams
from refimpl.comm.tasks import Tasks
from refimpl.comm.transport import Library
from refimpl.comm.work import Steps

Shows = Generator[Need, None, Tensor | None]


class Shared(Library):
    """`files`, `pids`: of every rank of the group; this rank's own file is among them."""

    def __init__(self, handle: dist.ProcessGroup, files: Sequence[Mapped], own: Own, pids: Sequence[int]) -> None:
        super().__init__(handle, "gloo", Streams())
        self.files, self.own = files, own
        weakref.finalize(self, own.leave).atexit = False
        ranks = dist.get_process_group_ranks(handle)
        self.watch = Watch(files, pids, [f"rank {ranks[m]} (process {pid})" for m, pid in enumerate(pids)])
        self.tasks = Tasks(self.watch, limit_of(handle))
        self._scratch = Scratch(empty=lambda numel, dtype, device: own.empty(numel, dtype))
        self._lent: list[tuple[list[Need], Tensor]] = []  # copies, until these needs are met: then all have read them
        self._all = Channel(self.rank, files, dict.fromkeys(range(self.size), 0))
        peers = [m for m in range(self.size) if m != self.rank]
        self._to = {m: self._between(self.rank, m) for m in peers}
        self._from = {m: self._between(m, self.rank) for m in peers}

    def _between(self, sender: int, receiver: int) -> Channel:
        begins = {
            sender: message_words(self.size, receiver, outward=True),
            receiver: message_words(self.size, sender, outward=False),
        }
        return Channel(self.rank, self.files, begins)

    def advance(self) -> None:
        self.tasks.advance()

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if device.type != "cpu":
            return super().empty(numel, dtype, device)
        with self.tasks.lock:
            return self.own.empty(numel, dtype)

    def trim(self) -> None:
        for need in [need for needs, _ in self._lent for need in needs]:
            while not self.watch.met(need):
                self.tasks.advance()
                self.watch.wait(need, SHORT)
        self._take_back()
        self._scratch.trim()

    def scratch(self) -> list[Tensor]:
        with self.tasks.lock:
            return self._scratch.tensors()

    def all_reduce(self, x: Tensor, op: Op) -> Steps:
        yield lambda: self.tasks.begin(self._all_reduce(x, op))

    def reduce_scatter(self, out: Tensor, x: Tensor, op: Op) -> Steps:
        rows = list(x.view(self.size, -1).unbind())
        yield lambda: self.tasks.begin(self._reduce(self._all.number(), out, rows, op))

    def all_gather(self, chunks: list[Tensor], x: Tensor) -> Steps:
        yield lambda: self.tasks.begin(self._gather(self._all.number(), chunks, x))

    def all_to_all(self, out: Tensor, x: Tensor, out_splits: list[int] | None, in_splits: list[int] | None) -> Steps:
        parts = _parts(out, out_splits, self.size), _parts(x, in_splits, self.size)
        yield lambda: self.tasks.begin(self._all_to_all(*parts))

    def broadcast(self, x: Tensor, root: int) -> Steps:
        yield lambda: self.tasks.begin(self._broadcast(x.view(-1), root))

    def send(self, x: Tensor, to: int) -> Steps:
        yield lambda: self.tasks.begin(self._give(self._to[to], x.detach().view(-1)))

    def recv(self, x: Tensor, source: int) -> Steps:
        yield lambda: self.tasks.begin(self._take(self._from[source], {source: x.detach().view(-1)}))

    def send_recv(self, x: Tensor, to: int, out: Tensor, source: int) -> Steps:
        yield lambda: [task for steps in (self.send(x, to), self.recv(out, source)) for task in next(steps)()]

    def _all_reduce(self, x: Tensor, op: Op) -> Iterator[Need]:
        first, second = self._all.number(), self._all.number()
        chunks = list(torch.split(x, collectives.chunk_sizes(x.numel(), self.size)))
        yield from self._reduce(first, chunks[self.rank], chunks, op, wait=False)
        # A peer that shows its sum has read everything of the first round: its chunk of mine may be overwritten.
        yield from self._gather(second, chunks, chunks[self.rank])

    def _reduce(self, number: int, out: Tensor, chunks: list[Tensor], op: Op, wait: bool = True) -> Iterator[Need]:
        """chunks, N tensors [s] of every rank -> out [s], the sum of those with this rank's number."""
        own = chunks[self.rank]
        copied = yield from self._show(self._all, number, {m: chunks[m] for m in self._all.others})
        yield from self._all.posted(number)
        rows = [own if m == self.rank else self._shown(self._all, m, number, own) for m in range(self.size)]
        collectives.ordered_reduce(out, rows, self.rank, op)
        yield from self._end(self._all, number, copied, wait)

    def _gather(self, number: int, chunks: list[Tensor], x: Tensor) -> Iterator[Need]:
        """x [s] of every rank -> chunks, N tensors [s]."""
        copied = yield from self._show_all(self._all, number, x)
        if chunks[self.rank].data_ptr() != x.data_ptr():
            chunks[self.rank].copy_(x)
        yield from self._copy(self._all, number, {m: chunks[m] for m in self._all.others})
        yield from self._end(self._all, number, copied)

    def _all_to_all(self, out: Sequence[Tensor], x: Sequence[Tensor]) -> Iterator[Need]:
        number = self._all.number()
        copied = yield from self._show(self._all, number, {m: x[m] for m in self._all.others})
        out[self.rank].copy_(x[self.rank])
        # Who has nothing for me is not waited for: a ring needs its left neighbour alone.
        yield from self._copy(self._all, number, {m: out[m] for m in self._all.others if out[m].numel()})
        yield from self._end(self._all, number, copied)

    def _broadcast(self, x: Tensor, root: int) -> Iterator[Need]:
        if self.rank == root:
            yield from self._give(self._all, x)
        else:
            yield from self._take(self._all, {root: x})

    def _give(self, channel: Channel, x: Tensor) -> Iterator[Need]:
        number = channel.number()
        copied = yield from self._show_all(channel, number, x)
        yield from self._end(channel, number, copied)

    def _take(self, channel: Channel, pieces: dict[int, Tensor]) -> Iterator[Need]:
        number = channel.number()
        yield from channel.post(number, {})
        yield from self._copy(channel, number, pieces)
        channel.finish(number)

    def _show(self, channel: Channel, number: int, pieces: dict[int, Tensor]) -> Shows:
        """Let each member read its piece, where it lies or in a copy; returns the buffer of the copies, if any."""
        copied = None
        if not all(map(self.own.holds, pieces.values())):
            copied = self._buffer(sum(map(len, pieces.values())), next(iter(pieces.values())))
            copies = torch.split(copied, [len(piece) for piece in pieces.values()])
            pieces = {m: copy.copy_(piece) for copy, (m, piece) in zip(copies, pieces.items(), strict=True)}
        yield from channel.post(number, {m: self.own.place(piece) for m, piece in pieces.items()})
        return copied

    def _show_all(self, channel: Channel, number: int, x: Tensor) -> Shows:
        """The same of one piece, which all members read."""
        copied = None if self.own.holds(x) else self._buffer(x.numel(), x).copy_(x)
        yield from channel.post(number, dict.fromkeys(channel.others, self.own.place(x if copied is None else copied)))
        return copied

    def _shown(self, channel: Channel, member: int, number: int, like: Tensor) -> Tensor:
        """What a member that has posted shows me: a flat view of its memory, as long as `like`."""
        place: Place = channel.place(member, number)
        if place[1] != like.numel() * like.element_size():
            raise CollectiveMismatch(
                f"{self.watch.names[member]} shows {place[1]} bytes where {self.watch.names[self.rank]} expects "
                f"{like.numel() * like.element_size()}: all ranks must make the same calls with the same sizes"
            )
        return self.files[member].at(place, like.dtype)

    def _copy(self, channel: Channel, number: int, pieces: dict[int, Tensor]) -> Iterator[Need]:
        """What members show me, each as soon as it is there -> pieces."""
        for member, piece in pieces.items():
            yield from channel.posted(number, member)
            piece.copy_(self._shown(channel, member, number, piece))

    def _end(self, channel: Channel, number: int, copied: Tensor | None, wait: bool = True) -> Iterator[Need]:
        """I have read; and my own may be written to again: all have read it, or read a copy."""
        channel.finish(number)
        if copied is not None:
            self._lent.append((list(channel.finished(number)), copied))
        elif wait:
            yield from channel.finished(number)

    def _buffer(self, numel: int, like: Tensor) -> Tensor:
        """A buffer in this rank's file: one that all have read, or a new one."""
        self._take_back()
        return self._scratch.take(numel, like)

    def _take_back(self) -> None:
        """The copies that all have read."""
        lent, self._lent = self._lent, []
        for needs, copy in lent:
            if all(self.watch.met(need) for need in needs):
                self._scratch.give(copy)
            else:
                self._lent.append((needs, copy))


def _parts(x: Tensor, splits: list[int] | None, ranks: int) -> list[Tensor]:
    """The rows of x for each rank, flat."""
    rows = splits or [x.shape[0] // ranks] * ranks
    return [part.reshape(-1) for part in torch.split(x, rows)]
