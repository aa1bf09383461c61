"""A group of ranks and the collectives they share: whoever communicates is handed a `Group`, there is no current one.

Traffic a rank sends for a buffer of n bytes on N ranks (counted in the group's `Ledger`):

    all_reduce      2n(N-1)/N      = reduce_scatter, then all_gather
    reduce_scatter   n(N-1)/N
    all_gather       n(N-1)/N      n is the gathered buffer
    all_to_all       n(N-1)/N
    broadcast        n(N-1)        of all ranks together, charged to the root
    send             n

How the bytes travel is the business of a `Transport`. On NCCL these are the library's own. Ranks of one host read each
other's memory (see `shared.py`). On gloo the reductions and the all-gather are composed (see `collectives.py`), which
is faster than gloo's own. Both ways, memory and gloo, add the ranks' contributions in rank order, so that every
strategy built on them gives the same bits; `deterministic=True` asks for it on NCCL too. The bytes charged are the
algorithm's, whatever the way.
DeepSpeed's counterpart: deepspeed/comm/comm.py, which keeps one global backend instead.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from refimpl.comm import checks, collectives
from refimpl.comm.agree import Part
from refimpl.comm.collectives import Op
from refimpl.comm.control import Control
from refimpl.comm.link import Link
from refimpl.comm.logged import entered
from refimpl.comm.nodes import refuse_uneven
from refimpl.comm.process_group import backend_of, device_of, libraries_of
from refimpl.comm.route import Route
from refimpl.comm.streams import Streams, streams_of
from refimpl.comm.transport import Transport
from refimpl.comm.work import Steps, Work
from refimpl.measure.ledger import Ledger
from refimpl.ranks import environment


class Group(Control):
    """`size` ranks, of which this process is number `rank`; `device` is where its tensors live.

    `ranks`: the numbers that they have in the job.
    """

    def __init__(
        self,
        handle: dist.ProcessGroup | None,
        ledger: Ledger | None = None,
        device: torch.device | None = None,
        deterministic: bool = False,
        streams: Streams | None = None,
        transport: Transport | str | None = None,
        link: Link | None = None,
    ) -> None:
        """`handle` None is a group of this process alone: every collective is a copy or nothing, and sends 0 bytes.

        `streams`: what orders the device's work, a GPU's own by default. `transport`: one, or "gloo" or "shared" for
        tensors on the CPU; by default what REFIMPL_TRANSPORT says, else shared memory if all ranks are on one host,
        else gloo. They find out at the group's first collective, which returns when all have come; over gloo so does
        the first all-reduce begun with `async_op=True`, for which a group of its own is made. ValueError for another,
        and for a handle that this rank is not in; RuntimeError for "shared" where it cannot be. `link`: a slow one
        between its ranks (see `link.py`); by default what REFIMPL_LINK says, else none.
        """
        if isinstance(handle, int):  # torch's GroupMember.NON_GROUP_MEMBER
            raise ValueError(f"rank {dist.get_rank()} is not in this process group: let its members alone make a Group")
        self.device = device or device_of(handle)
        self.backend = backend_of(handle, self.device)
        self.served = frozenset(libraries_of(handle))  # types of device
        self.streams = streams or streams_of(self.device)
        self.ledger = ledger or Ledger()
        self.deterministic = deterministic
        super().__init__(handle, self.backend)
        self.route = Route(handle, self.backend, self.device, self.streams, deterministic, transport, link)
        self.rank, self.size = self.route.direct.rank, self.route.direct.size
        if len(self.ranks) != self.size:  # a transport that plays the others
            self.ranks = list(range(self.size))

    @property
    def handle(self) -> dist.ProcessGroup | None:
        """torch's group; None in a group of one without it."""
        return self.route.handle

    @property
    def link(self) -> Link | None:
        """The slow link between its ranks, if there is one."""
        return self.route.link

    @property
    def transport(self) -> Transport:
        """The way of this group's collectives. Where it may be shared memory, asking for it first is a collective."""
        if self.route.met is None:
            self._agreed("a group's first collective", "").announce()
        return self.route.collectives

    @property
    def messages(self) -> Transport:
        """The way of the messages between two ranks."""
        return self.route.messages

    def share_messages(self) -> None:
        """Messages between two ranks go the way of the collectives from now on: through memory, where that is shared.

        A collective, with no message under way.
        """
        self.route.messages = self.transport

    def use(self, transport: Transport) -> None:
        """The collectives go this way from now on, on every rank; what is under way is not disturbed."""
        self.route.met = transport

    @classmethod
    def world(
        cls,
        ledger: Ledger | None = None,
        deterministic: bool = False,
        transport: str | None = None,
        link: Link | None = None,
    ) -> "Group":
        """All ranks of this job; a group of one in a process that is alone.

        RuntimeError if a launcher started this process as one of several ranks, and they were not joined: each would
        train by itself. ValueError if REFIMPL_RANKS_PER_NODE does not divide them.
        """
        if dist.is_initialized():
            refuse_uneven(dist.get_world_size())
        else:
            environment.expect_alone()
        handle = dist.group.WORLD if dist.is_initialized() else None
        return cls(handle, ledger, deterministic=deterministic, transport=transport, link=link)

    def throttled(self, link: Link) -> "Group":
        """The same ranks, ledger and device with a slow link between them."""
        return Group(self.handle, self.ledger, self.device, self.deterministic, self.streams, link=link)

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        """[numel] where this group's collectives need no copy of it: for buffers that travel often. Not resizable."""
        return self.transport.empty(numel, dtype, device or self.device)

    def scratch(self) -> list[Tensor]:
        """The buffers that collectives keep between calls: memory that counts as `buckets`."""
        return self.route.scratch()

    def trim(self) -> None:
        """Keep no buffer that is free: what comes now is of other sizes. On every rank, with nothing under way."""
        self.route.trim()

    def _run(self, op: str, sent: int, tag: str, async_op: bool, steps: Steps, *holds: Tensor) -> Work:
        """Enter the call in the ledger, begin it. `holds`: what it reads and writes, the message that counts last."""
        log = self.ledger.log
        logged = entered(log, op, tag, holds[-1], self.size, self.settle) if log else None
        call = self.ledger.start(op, sent, tag)
        lane, ledger = self.route.direct.lane, self.ledger
        if self.route.cables is not None:
            steps = self.route.counted(steps, lambda sent: ledger.cross(op, sent, tag))

        def waited(work: Work) -> None:
            ledger.end(call, *work.span(), held=work.held)
            if logged:
                logged.end()
            self.route.returned()

        work = Work(steps, lane, holds, waited, ledger.timed and lane is not None)
        if not async_op or (logged and logged.waits):
            work.wait()
        return work

    def all_reduce(self, x: Tensor, op: Op = "sum", *, async_op: bool = False, tag: str = "") -> Work:
        """Replace x [n] by its sum, mean or maximum over ranks, the same bits on every rank. Any n; x contiguous.

        Over gloo, and over a slow link, all ranks must say the same of `async_op`.
        """
        checks.reduction("all_reduce", op, x, x, self.served)
        sent = collectives.sent_in_all_reduce(x.numel(), self.rank, self.size) * x.element_size()
        agreed = self._agreed(f"all_reduce ({op}) of {_words(x)}", tag)
        with agreed:
            way, flat = self.transport, x.detach().view(-1)
            if async_op and way.in_halves:
                agreed.adds(", async_op=True")  # its halves travel apart
                steps = self.route.unattended(flat, op, lambda: self._meet(agreed))
            else:
                steps = way.all_reduce(flat, op)
        return self._run("all_reduce", sent, tag, async_op, agreed.collective(steps), x)

    def reduce_scatter(self, out: Tensor, x: Tensor, op: Op = "sum", *, async_op: bool = False, tag: str = "") -> Work:
        """x [N*s] on every rank -> out [s]: this rank's chunk of the sum, mean or maximum.

        `out` may be x's own chunk, or of a wider dtype, into which the result in x's dtype is then copied. x must stay
        untouched until the work is done. ValueError if sizes do not fit.
        """
        if x.numel() != out.numel() * self.size:
            raise ValueError(f"reduce_scatter: x has {x.numel()} elements, out {out.numel()}, ranks {self.size}")
        checks.reduction("reduce_scatter", op, x, out, self.served)
        sent = (x.numel() - out.numel()) * x.element_size()
        agreed = self._agreed(f"reduce_scatter ({op}) of {_words(x)}", tag)
        with agreed:
            steps = self.transport.reduce_scatter(out.detach().view(-1), x.detach().view(-1), op)
        return self._run("reduce_scatter", sent, tag, async_op, agreed.collective(steps), out, x)

    def all_gather(self, out: Tensor | list[Tensor], x: Tensor, *, async_op: bool = False, tag: str = "") -> Work:
        """x [s] on every rank -> out [N*s] in rank order, or N tensors [s]. x may be out's own chunk.

        ValueError if sizes do not fit.
        """
        sizes = [out.numel()] if isinstance(out, Tensor) else [chunk.numel() for chunk in out]
        if sizes != ([x.numel() * self.size] if isinstance(out, Tensor) else [x.numel()] * self.size):
            has = " + ".join(map(str, sizes))
            raise ValueError(f"all_gather: out has {has} elements, x {x.numel()}, ranks {self.size}")
        checks.tensors("all_gather", self.served, x=x, out=out)
        flat = (
            out.detach().view(self.size, -1).unbind() if isinstance(out, Tensor) else [c.detach().view(-1) for c in out]
        )
        sent = x.numel() * x.element_size() * (self.size - 1)
        agreed = self._agreed(f"all_gather of {_words(x)} a rank", tag)
        with agreed:
            steps = self.transport.all_gather(list(flat), x.detach().view(-1))
        return self._run("all_gather", sent, tag, async_op, agreed.collective(steps), *flat, x)

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
        """Rank r's chunk i of x becomes rank i's chunk r of out. Splits count rows of dimension 0; equal by default.

        Either no rank gives splits, or each gives some: of the rows that it sends, that it receives, or both.
        """
        checks.tensors("all_to_all", self.served, x=x, out=out)
        kept = checks.splits("all_to_all", self.rank, self.size, x=(x, in_splits), out=(out, out_splits))
        sent = (x.numel() - kept) * x.element_size()
        what, parts = f"all_to_all of {_words(x)}", list[Part]()
        if in_splits or out_splits:
            what, parts = "all_to_all in uneven parts", self._parts(out, x, out_splits, in_splits)
        agreed = self._agreed(what, tag, parts)
        with agreed:
            steps = self.transport.all_to_all(out, x, out_splits, in_splits)
        return self._run("all_to_all", sent, tag, async_op, agreed.collective(steps), out, x)

    def broadcast(self, x: Tensor, root: int = 0, *, async_op: bool = False, tag: str = "") -> Work:
        """x of rank `root` -> x on every rank. The root is charged n(N-1) bytes, the others 0.

        (On gloo others relay it, in a binomial tree, of which the root itself sends n log2(N), rounded up.)
        """
        checks.member("broadcast", "root", root, self.size)
        checks.tensors("broadcast", self.served, x=x)
        sent = x.numel() * x.element_size() * (self.size - 1) if self.rank == root else 0
        agreed = self._agreed(f"broadcast of {_words(x)} from {self.ranks[root]}", tag)
        with agreed:
            steps = self.transport.broadcast(x, root)
        return self._run("broadcast", sent, tag, async_op, agreed.collective(steps), x)

    def send(self, x: Tensor, to: int, *, async_op: bool = False, tag: str = "") -> Work:
        """Send x to rank `to` of this group, which must call `recv`. Sends n bytes. ValueError if there is no such."""
        checks.other("send", "to", to, self.size, self.rank)
        checks.tensors("send", self.served, x=x)
        steps = self.messages.send(x, to)  # first: on a slow link it leaves at this instant
        sent = x.numel() * x.element_size()
        agreed = self._agreed(f"send of {_words(x)} to {self.ranks[to]}", tag, [((self.rank, to), _words(x))])
        return self._run("send", sent, tag, async_op, agreed.message(steps), x)

    def recv(self, x: Tensor, source: int, *, async_op: bool = False, tag: str = "") -> Work:
        """Fill x with what rank `source` of this group sends. Sends nothing itself. ValueError if there is no such."""
        checks.other("recv", "source", source, self.size, self.rank)
        checks.tensors("recv", self.served, x=x)
        words = f"recv of {_words(x)} from {self.ranks[source]}"
        agreed = self._agreed(words, tag, [((source, self.rank), _words(x))])
        return self._run("recv", 0, tag, async_op, agreed.message(self.messages.recv(x, source)), x)

    def send_recv(self, x: Tensor, to: int, out: Tensor, source: int, *, async_op: bool = False, tag: str = "") -> Work:
        """Send x to rank `to` while `out` is filled with what rank `source` sends. One work, done when both are.

        Sends n bytes. All ranks may call it at once, in any ring or exchange, where a send and then a recv could wait
        for each other. ValueError if there is no such rank.
        """
        checks.other("send_recv", "to", to, self.size, self.rank)
        checks.other("send_recv", "source", source, self.size, self.rank)
        checks.tensors("send_recv", self.served, x=x)
        checks.tensors("send_recv", self.served, out=out)
        begun = self.messages.send_recv(x, to, out, source)
        what = f"send_recv of {_words(x)} to {self.ranks[to]} and {_words(out)} from {self.ranks[source]}"
        parts = [((self.rank, to), _words(x)), ((source, self.rank), _words(out))]
        steps = self._agreed(what, tag, parts).message(begun)
        sending = self._run("send", x.numel() * x.element_size(), tag, True, steps, out, x)
        return self._run("recv", 0, tag, async_op, iter([lambda: [sending]]), out)

    def settle(self) -> None:
        """Before the host reads a number from a GPU: return, patiently (see `Patience`), when it is there."""
        if self.device.type == "cuda":
            queued = self.streams.record()
            self.patience.poll(lambda: self.streams.is_done(queued))

    def _parts(self, out: Tensor, x: Tensor, out_splits: list[int] | None, in_splits: list[int] | None) -> list[Part]:
        """The messages to and from every other rank of an all-to-all in uneven parts."""
        parts: list[Part] = []
        for mine, splits, sent in ((x, in_splits, True), (out, out_splits, False)):
            equal = [mine.shape[0] // self.size] * self.size
            for other, rows in enumerate(mine.split(splits or equal)):  # type: ignore[no-untyped-call]
                if other != self.rank:
                    parts.append(((self.rank, other) if sent else (other, self.rank), _words(rows)))
        return parts


def _words(x: Tensor) -> str:
    return f"{x.numel()} {str(x.dtype).removeprefix('torch.')}"
