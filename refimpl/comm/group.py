"""A group of ranks and the collectives they share: whoever communicates is handed a `Group`, there is no current one.

Traffic a rank sends for a buffer of n bytes on N ranks (counted in the group's `Ledger`):

    all_reduce      2n(N-1)/N      = reduce_scatter, then all_gather
    reduce_scatter   n(N-1)/N
    all_gather       n(N-1)/N      n is the gathered buffer
    all_to_all       n(N-1)/N
    broadcast        n(N-1)        charged to the root
    send             n

On NCCL these are the library's own. On gloo the reductions and the all-gather are composed (see `collectives.py`),
which is faster than gloo's own and adds the ranks' contributions in rank order, so that every strategy built on them
gives the same bits. `deterministic=True` asks for that order on NCCL too.
DeepSpeed's counterpart: deepspeed/comm/comm.py, which keeps one global backend instead.
"""

import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from refimpl.comm import checks, collectives
from refimpl.comm.agree import Agreed, Part
from refimpl.comm.agree import Phase as Phase
from refimpl.comm.board import Board
from refimpl.comm.collectives import Op
from refimpl.measure.ledger import Ledger
from refimpl.ranks import environment


class Work:
    """A collective under way: phases, each started when the transfers of the one before have arrived."""

    def __init__(self, *phases: Phase) -> None:
        self._phases, self._handles = deque(phases), list[Any]()
        self.advance()

    def advance(self) -> None:
        """Wait for the transfers under way, then start the next phase. Nothing once the work is done."""
        for handle in self._handles:
            handle.wait()
        self._handles = self._phases.popleft()() if self._phases else []

    def wait(self) -> None:
        """Return when the result may be used (on NCCL: when the current stream is ordered after it)."""
        while self._handles or self._phases:
            self.advance()


class Group:
    """`size` ranks, of which this process is number `rank`; `device` is where its tensors live."""

    def __init__(
        self,
        handle: dist.ProcessGroup | None,
        ledger: Ledger | None = None,
        device: torch.device | None = None,
        deterministic: bool = False,
    ) -> None:
        """`handle` None is a group of this process alone: every collective is a copy or nothing, and sends 0 bytes."""
        self._name = handle.group_name if handle else None
        self.rank = handle.rank() if handle else 0
        self.size = handle.size() if handle else 1
        self.backend: str = dist.get_backend(handle) if handle else "none"
        self.device = device or torch.device(os.environ.get("REFIMPL_DEVICE", "cpu"))
        self.ledger = ledger or Ledger()
        self._ordered = self.backend == "gloo" or deterministic
        self._scratch = collectives.Scratch()
        directory = os.environ.get("REFIMPL_BOARD")
        ranks = dist.get_process_group_ranks(handle) if handle else []
        self._board = Board(Path(directory), handle.group_name, ranks, self.rank) if handle and directory else None

    @property
    def handle(self) -> dist.ProcessGroup | None:
        """torch's group, looked up by name: who still holds one when Python exits makes the process abort."""
        if self._name is None:
            return None
        return distributed_c10d._resolve_process_group(self._name)  # type: ignore[attr-defined]

    @classmethod
    def world(cls, ledger: Ledger | None = None, deterministic: bool = False) -> "Group":
        """All ranks of this job; a group of one in a process that is alone.

        RuntimeError if a launcher started this process as one of several ranks, and they were not joined: each would
        train by itself.
        """
        if not dist.is_initialized():
            environment.expect_alone()
        return cls(dist.group.WORLD if dist.is_initialized() else None, ledger, deterministic=deterministic)

    def scratch(self) -> list[Tensor]:
        """The receive buffers kept between calls: memory that counts as `buckets`."""
        return self._scratch.tensors()

    def _run(self, op: str, sent: int, tag: str, async_op: bool, *phases: Phase) -> Work:
        """Enter the call in the ledger, run its phases (none of which communicates in a group of one)."""
        call = self.ledger.start(op, sent, tag)

        def end() -> list[Any]:
            self.ledger.end(call)
            return []

        work = Work(*phases, end)
        if not async_op:
            work.wait()
        return work

    def _agreed(self, what: str, tag: str, parts: Sequence[Part] = ()) -> Agreed:
        """What is begun only when no rank is seen to begin something else; `what` must be equal on all ranks."""
        board = self._board if self.size > 1 else None
        return Agreed(board, dist.get_rank() if self._name else 0, what, tag, parts)

    def all_reduce(self, x: Tensor, op: Op = "sum", *, async_op: bool = False, tag: str = "") -> Work:
        """Replace x [n] by its sum, mean or maximum over ranks, the same bits on every rank. Any n; x contiguous."""
        checks.tensors("all_reduce", x=x)
        checks.reduction("all_reduce", op, x, x)
        sizes = collectives.chunk_sizes(x.numel(), self.size)
        mine = sizes[self.rank]
        sent = (x.numel() - mine + mine * (self.size - 1)) * x.element_size()
        if self.size == 1:
            return self._run("all_reduce", 0, tag, async_op)
        flat = x.detach().view(-1)
        begin = self._agreed(f"all_reduce ({op}) of {_words(x)}", tag).collective
        if not self._ordered:
            native = begin(lambda: collectives.native_all_reduce(self.handle, flat, op))
            return self._run("all_reduce", sent, tag, async_op, native)
        chunks = list(flat.split(sizes))  # type: ignore[no-untyped-call]
        received = self._scratch.take(mine * (self.size - 1), flat)

        def exchange() -> list[Any]:
            return collectives.exchange(self.handle, received, flat, sizes, self.rank)

        def reduce_and_share() -> list[Any]:
            own = chunks[self.rank]
            collectives.ordered_reduce(own, received, own, self.rank, op)
            self._scratch.give(received)
            return collectives.all_gather(self.handle, chunks, own, self.rank)

        return self._run("all_reduce", sent, tag, async_op, begin(exchange), begin(reduce_and_share))

    def reduce_scatter(self, out: Tensor, x: Tensor, op: Op = "sum", *, async_op: bool = False, tag: str = "") -> Work:
        """x [N*s] on every rank -> out [s]: this rank's chunk of the sum, mean or maximum.

        `out` may be x's own chunk. x must stay untouched until the work is done. ValueError if sizes do not fit.
        """
        if x.numel() != out.numel() * self.size:
            raise ValueError(f"reduce_scatter: x has {x.numel()} elements, out {out.numel()}, ranks {self.size}")
        checks.tensors("reduce_scatter", x=x, out=out)
        checks.reduction("reduce_scatter", op, x, out)
        sent = (x.numel() - out.numel()) * x.element_size()
        out, x = out.detach().view(-1), x.detach().view(-1)
        begin = self._agreed(f"reduce_scatter ({op}) of {_words(x)}", tag).collective
        if self.size > 1 and not self._ordered:
            native = begin(lambda: collectives.native_reduce_scatter(self.handle, out, x, op))
            return self._run("reduce_scatter", sent, tag, async_op, native)
        own = x.view(self.size, -1)[self.rank]
        received = self._scratch.take(x.numel() - own.numel(), x)
        sizes = [own.numel()] * self.size

        def exchange() -> list[Any]:
            return collectives.exchange(self.handle, received, x, sizes, self.rank) if self.size > 1 else []

        def reduce() -> list[Any]:
            collectives.ordered_reduce(out, received, own, self.rank, op)
            self._scratch.give(received)
            return []

        return self._run("reduce_scatter", sent, tag, async_op, begin(exchange), reduce)

    def all_gather(self, out: Tensor | list[Tensor], x: Tensor, *, async_op: bool = False, tag: str = "") -> Work:
        """x [s] on every rank -> out [N*s] in rank order, or N tensors [s]. x may be out's own chunk.

        ValueError if sizes do not fit.
        """
        whole = out.numel() if isinstance(out, Tensor) else sum(chunk.numel() for chunk in out)
        if whole != x.numel() * self.size or (isinstance(out, list) and any(c.numel() != x.numel() for c in out)):
            raise ValueError(f"all_gather: out has {whole} elements, x {x.numel()}, ranks {self.size}")
        checks.tensors("all_gather", x=x, out=out)
        checks.same_dtype("all_gather", x, out)
        x = x.detach().view(-1)
        chunks = (
            list(out.detach().view(self.size, -1)) if isinstance(out, Tensor) else [c.detach().view(-1) for c in out]
        )
        sent = x.numel() * x.element_size() * (self.size - 1)

        def start() -> list[Any]:
            if self.backend == "nccl":
                into = out.detach().view(-1) if isinstance(out, Tensor) else chunks
                return collectives.native_all_gather(self.handle, into, x)
            return collectives.all_gather(self.handle, chunks, x, self.rank)

        begin = self._agreed(f"all_gather of {_words(x)} a rank", tag).collective
        return self._run("all_gather", sent, tag, async_op, begin(start))

    def all_to_all(
        self,
        out: Tensor,
        x: Tensor,
        *,
        out_splits: list[int] | None = None,
        in_splits: list[int] | None = None,
        async_op: bool = False,
        tag: str = "",
    ) -> Work:
        """Rank r's chunk i of x becomes rank i's chunk r of out. Splits count rows of dimension 0; equal by default."""
        checks.tensors("all_to_all", x=x, out=out)
        checks.same_dtype("all_to_all", x, out)
        checks.splits("all_to_all", self.size, x=(x, in_splits), out=(out, out_splits))
        kept = in_splits[self.rank] * (x.numel() // max(1, x.shape[0])) if in_splits else x.numel() // self.size
        sent = (x.numel() - kept) * x.element_size()

        def start() -> list[Any]:
            if self.size == 1:
                out.copy_(x)
                return []
            return collectives.all_to_all(self.handle, out, x, out_splits, in_splits)

        what, parts = f"all_to_all of {_words(x)}", list[Part]()
        if in_splits or out_splits:
            what, parts = "all_to_all in uneven parts", self._parts(out, x, out_splits, in_splits)
        begin = self._agreed(what, tag, parts).collective
        return self._run("all_to_all", sent, tag, async_op, begin(start))

    def broadcast(self, x: Tensor, root: int = 0, *, async_op: bool = False, tag: str = "") -> Work:
        """x of rank `root` -> x on every rank. The root is charged n(N-1) bytes, the others 0."""
        checks.member("broadcast", "root", root, self.size)
        checks.tensors("broadcast", x=x)
        sent = x.numel() * x.element_size() * (self.size - 1) if self.rank == root else 0
        begin = self._agreed(f"broadcast of {_words(x)} from {root}", tag).collective
        phases = [begin(lambda: collectives.broadcast(self.handle, x, root))] if self.size > 1 else []
        return self._run("broadcast", sent, tag, async_op, *phases)

    def send(self, x: Tensor, to: int, *, async_op: bool = False, tag: str = "") -> Work:
        """Send x to rank `to` of this group, which must call `recv`. Sends n bytes. ValueError if there is no such."""
        checks.other("send", "to", to, self.size, self.rank)
        checks.tensors("send", x=x)
        sent = x.numel() * x.element_size()
        begin = self._agreed(f"send of {_words(x)} to {to}", tag, [((self.rank, to), _words(x))]).message
        return self._run("send", sent, tag, async_op, begin(lambda: [dist.isend(x, group=self.handle, group_dst=to)]))

    def recv(self, x: Tensor, source: int, *, async_op: bool = False, tag: str = "") -> Work:
        """Fill x with what rank `source` of this group sends. Sends nothing itself. ValueError if there is no such."""
        checks.other("recv", "source", source, self.size, self.rank)
        checks.tensors("recv", x=x)
        begin = self._agreed(f"recv of {_words(x)} from {source}", tag, [((source, self.rank), _words(x))]).message
        return self._run("recv", 0, tag, async_op, begin(lambda: [dist.irecv(x, group=self.handle, group_src=source)]))

    def barrier(self) -> None:
        """Return when every rank has come here."""
        if self.handle is not None:
            with self._agreed("barrier", ""):
                dist.barrier(self.handle)

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Every rank's picklable object, in rank order. For control, not for data: not charged to the ledger."""
        objects: list[Any] = [obj] * self.size
        if self.handle is not None:
            with self._agreed("all_gather_object", ""):
                dist.all_gather_object(objects, obj, group=self.handle)
        return objects

    def _parts(self, out: Tensor, x: Tensor, out_splits: list[int] | None, in_splits: list[int] | None) -> list[Part]:
        """The messages to and from every other rank of an all-to-all in uneven parts."""
        parts: list[Part] = []
        for mine, splits, sent in ((x, in_splits, True), (out, out_splits, False)):
            for other, rows in enumerate(mine.split(splits or mine.shape[0] // self.size)):  # type: ignore[no-untyped-call]
                if other != self.rank:
                    parts.append(((self.rank, other) if sent else (other, self.rank), _words(rows)))
        return parts


def _words(x: Tensor) -> str:
    return f"{x.numel()} {str(x.dtype).removeprefix('torch.')}"
