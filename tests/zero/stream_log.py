"""Which access waits for which: a log of streams that exist on paper only, and the races that it shows.

`Recorder` stands in for a GPU's streams, and `Watch` sees every access to memory while it is in force: those of torch's
operations, by their schemas; those of collectives, which are kernels of the stream they are called on; and what the
allocator may do with a block that was given back, which is a write of the stream that allocated it (see
`refimpl.comm.streams`). `races` asks torch's own sanitizer, which is plain Python, which two accesses of one block, one
of them a write, no event orders.

Where the device is not the CPU (tests/gpu/pretend.py) the host is one more stream, and its memory counts as pinned:

    an operation on the CPU's tensors    an access by the host, at once
    a kernel                             is behind all that the host did before it was queued
    a copy between the two               a kernel, for which the host waits unless it is `non_blocking`
    `.item()`, `synchronize`, a mask     the host waits

So memory that a copy still fills or reads while the host reads or writes it is a race too.
"""

import sys
import traceback
import weakref
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage
from torch.cuda._sanitizer import EventHandler, zip_arguments
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from refimpl.comm.streams import Streams

HOST, COMPUTE = -1, 0  # COMPUTE: the stream that a program begins on
ASKING = {
    "_local_scalar_dense",
    "bincount",
    "equal",
    "masked_select",
    "nonzero",
    "repeat_interleave",
    "unique",
    "_unique2",
}


@dataclass(frozen=True)
class Record:
    event: int
    stream: int


@dataclass(frozen=True)
class Wait:
    event: int
    stream: int
    where: str  # "result: _settle", see `caller`; "": a kernel is behind what the host did before it was queued


@dataclass(frozen=True)
class Kernel:
    name: str
    stream: int
    reads: frozenset[int]
    writes: frozenset[int]


@dataclass(frozen=True)
class Free:
    block: int


@dataclass
class Recorder(Streams):
    """Streams whose every call is written down."""

    log: list[Record | Wait | Kernel | Free] = field(default_factory=list)
    stack: list[int] = field(default_factory=lambda: [COMPUTE])
    streams: int = 1
    events: int = 0

    def new(self) -> int:
        self.streams += 1
        return self.streams - 1

    def current(self) -> int:
        return self.stack[-1]

    @contextmanager
    def use(self, stream: int) -> Iterator[None]:
        self.stack.append(stream)
        try:
            yield
        finally:
            self.stack.pop()

    def record(self, timed: bool = False) -> int:
        self.events += 1
        self.log.append(Record(self.events, self.current()))
        return self.events

    def wait(self, event: int) -> None:
        self.log.append(Wait(event, self.current(), caller()))

    def launch(self) -> None:
        """The next kernel is queued by the host, behind all that it has done."""
        self.events += 1
        self.log += [Record(self.events, HOST), Wait(self.events, self.current(), "")]

    def host_waits(self, *streams: int) -> str:
        """Until what these streams were given is done. -> where it does"""
        where = caller("host")
        for stream in streams:
            self.events += 1
            self.log += [Record(self.events, stream), Wait(self.events, HOST, where)]
        return where

    def waits(self) -> dict[str, set[int]]:
        """The places of the waits in the log, by what asked for them."""
        places: dict[str, set[int]] = {}
        for at, entry in enumerate(self.log):
            if isinstance(entry, Wait) and entry.where:
                places.setdefault(entry.where, set()).add(at)
        return places

    def waits_of(self, where: str) -> set[int]:
        """The streams that wait there."""
        return {e.stream for e in self.log if isinstance(e, Wait) and e.where == where}

    def with_repeats(self, entries: Collection[int]) -> set[int]:
        """These waits and all others of the same stream for the same event."""
        waits = [(at, e) for at, e in enumerate(self.log) if isinstance(e, Wait)]
        same = {(e.event, e.stream) for at, e in waits if at in entries}
        return {at for at, e in waits if (e.event, e.stream) in same}


class Watch(TorchDispatchMode):
    """Logs every access to memory with the recorder's current stream. `asked`: where the host waits, and how often."""

    def __init__(self, recorder: Recorder, device: str = "cpu") -> None:
        """`device`: the type of what has streams."""
        super().__init__()
        self.recorder, self.device = recorder, device
        self.asked: Counter[str] = Counter()
        self._block: dict[int, int] = {}  # storage -> the block of memory that it has now
        self._stream_of: dict[int, int] = {}  # block -> the stream that allocated it
        self._blocks = 0
        self._patches: list[Any] = []

    @property
    def syncs(self) -> int:
        """How often the host waits."""
        return self.asked.total()

    def __enter__(self) -> "Watch":
        resize, tolist, tensor_of = UntypedStorage.resize_, Tensor.tolist, torch.tensor

        def resized(storage: UntypedStorage, size: int) -> Any:
            if storage.nbytes():
                self._freed(storage._cdata)
            result = resize(storage, size)
            if size:
                self._kernel("allocate", set(), {self._block_of(storage, fresh=True)})
            return result

        def listed(tensor: Tensor) -> Any:
            if self.device == "cpu":  # another's is copied, which is seen
                self.host_waits()
            return tolist(tensor)

        def copied(*args: Any, **options: Any) -> Tensor:
            tensor = tensor_of(*args, **options)
            if tensor.numel():
                stream = HOST if self._is_hosts(tensor) else self.recorder.current()
                self._kernel("from the host", set(), {self._block_of(tensor.untyped_storage(), fresh=True)}, stream)
            if "device" in options and "pin_memory" not in options and not self._is_hosts(tensor):
                self.host_waits()
            return tensor

        self._patches = [
            mock.patch.object(UntypedStorage, "resize_", resized),
            mock.patch.object(Tensor, "tolist", listed),
            mock.patch.object(torch, "tensor", copied),
            mock.patch.object(torch.accelerator, "synchronize", self.synchronized),
        ]
        for patch in self._patches:
            patch.start()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for patch in self._patches:
            patch.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {t.untyped_storage()._cdata for t in tensors((args, kwargs))}
        result = func(*args, **kwargs)
        if func.namespace == "c10d":  # the schemas of collectives do not say what they write
            written, read = tensors(args[0]), tensors(args[1])
            if func is torch.ops.c10d.send.default:
                written, read = [], written
            arrive(written, read)
        else:
            pairs = list(zip_arguments(func._schema, args, kwargs))
            written = [t for a, v in pairs if a.alias_info is not None and a.alias_info.is_write for t in tensors(v)]
            read = [t for a, v in pairs if a.alias_info is None for t in tensors(v)]
            results = result if isinstance(result, tuple) else (result,)
            new = [v for r, v in zip(func._schema.returns, results, strict=False) if r.alias_info is None]
            fresh_ones = [t for t in tensors(new) if t.untyped_storage()._cdata not in given]
            written += fresh_ones
            for t in fresh_ones:
                self._block_of(t.untyped_storage(), fresh=True)
        self._access(str(func), read, written, waits_for_values(func, args), is_queued(func, args, kwargs))
        return result

    def _access(self, name: str, read: list[Tensor], written: list[Tensor], asks: bool, queued: bool) -> None:
        """`asks`: whether the host must know values of it; `queued`: it does not wait if this is a copy."""
        read, written = ([t for t in ts if t.untyped_storage().nbytes()] for ts in (read, written))
        if name != "aten.copy_.default" and not all(self._is_hosts(t) for t in (*read, *written)):
            # A single number of the host's travels with the kernel.
            read = [t for t in read if t.dim() or not self._is_hosts(t)]
        is_hosts = [self._is_hosts(t) for t in (*read, *written)]
        if not is_hosts:
            return
        both = any(is_hosts) and not all(is_hosts)
        if both:
            self.recorder.launch()
        writes = {self._block_of(t.untyped_storage()) for t in written}
        reads = {self._block_of(t.untyped_storage()) for t in read} - writes
        self._kernel(name, reads, writes, HOST if all(is_hosts) else self.recorder.current())
        if (both and not queued) or (asks and not all(is_hosts)):
            self.host_waits()

    def synchronized(self, device: Any = None) -> None:
        """`torch.accelerator.synchronize`."""
        self.host_waits(*range(self.recorder.streams))

    def host_waits(self, *streams: int) -> None:
        """For these, by default the current one."""
        self.asked[self.recorder.host_waits(*streams or [self.recorder.current()])] += 1

    def touch(self, tensor: Tensor, write: bool, stream: int = HOST) -> None:
        """`tensor` is read or written otherwise than by torch, by default by the host."""
        block = {self._block_of(tensor.untyped_storage())}
        self._kernel("write" if write else "read", set() if write else block, block if write else set(), stream)

    def _is_hosts(self, tensor: Tensor | UntypedStorage) -> bool:
        return tensor.device.type != self.device

    def _kernel(self, name: str, reads: set[int], writes: set[int], stream: int | None = None) -> None:
        stream = self.recorder.current() if stream is None else stream
        self.recorder.log.append(Kernel(name, stream, frozenset(reads), frozenset(writes)))

    def _block_of(self, storage: UntypedStorage, fresh: bool = False) -> int:
        """`fresh`: a block not seen before was allocated now, on the current stream, else before all, on the first."""
        key = storage._cdata
        if key not in self._block:
            self._blocks += 1
            self._block[key] = self._blocks
            stream = self.recorder.current() if fresh else COMPUTE
            self._stream_of[self._blocks] = HOST if self._is_hosts(storage) else stream
            weakref.finalize(storage, self._freed, key, self._blocks).atexit = False
        return self._block[key]

    def _freed(self, key: int, block: int | None = None) -> None:
        """The allocating stream may have the block's memory for something else from now on.

        The host's is not given to others while a copy uses it: torch's allocator of pinned memory sees to that.
        """
        if block not in (None, self._block.get(key)):
            return  # it was given back by resize_ already
        block = self._block.pop(key, None)
        if block is not None:
            if (stream := self._stream_of[block]) != HOST:
                self.recorder.log.append(Kernel("free", stream, frozenset(), frozenset({block})))
            self.recorder.log.append(Free(block))


@contextmanager
def messages_aside(watch: Watch) -> Iterator[None]:
    """Messages between two ranks go by a stream of the library's, as NCCL's `isend` and `irecv` do, not by the lane."""
    recorder, stream = watch.recorder, watch.recorder.new()

    def begin(name: str, x: Tensor) -> SimpleNamespace:
        asked = recorder.record()
        with recorder.use(stream):
            recorder.log.append(Wait(asked, stream, ""))
            watch.touch(x, name == "recv", stream)
            done = recorder.record()
        return SimpleNamespace(wait=lambda: recorder.wait(done))

    send = mock.patch.object(dist, "isend", lambda x, **_: begin("send", x))
    with send, mock.patch.object(dist, "irecv", lambda x, **_: begin("recv", x)):
        yield


@contextmanager
def pretended(rank: int = 3, backend: str = "fake") -> Iterator[int]:
    """This process is one rank of 8, whose collectives send nothing."""
    dist.init_process_group(backend, store=FakeStore(), rank=rank, world_size=8)
    try:
        # Nobody else adds its own to the sums.
        with mock.patch("refimpl.zero.update.checksum", return_value=[0.0, 0.0]):
            yield 8
    finally:
        dist.destroy_process_group()


def needless(recorder: Recorder, kinds: tuple[str, ...] = ("inputs", "result")) -> set[str]:
    """The places of these kinds that wait, and without which nothing races."""
    places = {where: entries for where, entries in recorder.waits().items() if where.startswith(kinds)}
    return {where for where in places if not any(in_turn(recorder.log, recorder.with_repeats(places[where])))}


def caller(kind: str = "") -> str:
    """Which of the waits this is, and the innermost function outside `refimpl.comm` that wanted it.

    "inputs": the communication's stream waits for the caller's; "result": the caller's for the communication's;
    "buffer": whoever gets a buffer for its last user; "host": the host waits.
    """
    kinds = {"following": "inputs", "wait": "result", "take": "buffer", "followed_by": "buffer"}
    frame = sys._getframe(1)
    while frame.f_back is not None:
        ours = Path(frame.f_code.co_filename).parent.name == "comm"
        kind = kind or (kinds.get(frame.f_code.co_name, "") if ours else "")
        if "refimpl" in frame.f_code.co_filename and not ours:
            break
        frame = frame.f_back
    return f"{kind}: {frame.f_code.co_name}"


def tensors(tree: Any) -> list[Tensor]:
    """The tensors in it, those inside wrappers too."""
    return [getattr(leaf, "part", leaf) for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def waits_for_values(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether the host must know a value, or the result's shape is one of values. Repeats may be told the size."""
    name = func._schema.name.partition("::")[2]
    by_mask = name == "index" and any(t is not None and t.dtype == torch.bool for t in args[1])
    return by_mask or name in ASKING


def is_queued(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a copy between host and device does not make the host wait."""
    return any(a.name == "non_blocking" and v for a, v in zip_arguments(func._schema, args, kwargs))


@torch.no_grad()
def arrive(out: list[Tensor], sent: list[Tensor]) -> None:
    """Numbers of this rank's own, as torch 2.13's "fake" backend delivers. 2.11's leaves some outputs as they were."""
    if sent:
        own = torch.cat([t.flatten() for t in sent])
        for t in out:
            t.copy_(own[torch.arange(t.numel()) % own.numel()].view_as(t))


def races(log: list[Any], without: Collection[int] = ()) -> list[str]:
    """Pairs of accesses that nothing orders, in a log from which the entries of these numbers are missing."""
    return list(in_turn(log, without))


def in_turn(log: list[Any], without: Collection[int] = ()) -> Iterator[str]:
    """The same one by one: to know whether there is any, the first is enough."""
    handler, nowhere = EventHandler(), traceback.StackSummary()
    # No `return_value`: a Mock, called for every kernel, took nine tenths of the time.
    with mock.patch.object(traceback.StackSummary, "extract", lambda *_, **__: nowhere):  # noqa: PT008
        for at, entry in enumerate(log):
            if at in without:
                continue
            if isinstance(entry, Record):
                handler._handle_event_record(entry.event, entry.stream)
            elif isinstance(entry, Wait) and entry.stream == HOST:
                handler._handle_event_synchronization(entry.event)
            elif isinstance(entry, Wait):
                handler._handle_event_wait(entry.event, entry.stream)
            elif isinstance(entry, Free):
                handler._handle_memory_deallocation(entry.block)
            else:
                aliases = {block: [] for block in entry.reads | entry.writes}
                for error in handler._handle_kernel_launch(
                    entry.stream, set(entry.reads), set(entry.writes), set(), entry.name, aliases
                ):
                    one, other = error.previous_access, error.current_access
                    yield f"{one.operator} on stream {one.stream}, {other.operator} on stream {other.stream}"
