"""Which access waits for which: a log of streams that exist on paper only, and the races that it shows.

`Recorder` stands in for a GPU's streams, and `Watch` sees every access to memory while it is in force: those of torch's
operations, by their schemas; those of collectives, which are kernels of the stream they are called on; and what the
allocator may do with a block that was given back, which is a write of the stream that allocated it (see
`refimpl.comm.streams`). `races` asks torch's own sanitizer, which is plain Python, which two accesses of one block, one
of them a write, no event orders.
"""

import sys
import traceback
import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, UntypedStorage
from torch.cuda._sanitizer import EventHandler, zip_arguments
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from refimpl.comm.streams import Streams

COMPUTE = 0  # the stream that a program begins on
SIZED_BY_VALUES = {"bincount", "equal", "masked_select", "nonzero", "repeat_interleave", "unique", "_unique2"}


@dataclass(frozen=True)
class Record:
    event: int
    stream: int


@dataclass(frozen=True)
class Wait:
    event: int
    stream: int
    where: str  # "result: _settle", see `caller`


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
        yield
        self.stack.pop()

    def record(self, timed: bool = False) -> int:
        self.events += 1
        self.log.append(Record(self.events, self.current()))
        return self.events

    def wait(self, event: int) -> None:
        self.log.append(Wait(event, self.current(), caller()))

    def waits(self) -> dict[str, set[int]]:
        """The places of the waits in the log, by what asked for them."""
        places: dict[str, set[int]] = {}
        for at, entry in enumerate(self.log):
            if isinstance(entry, Wait):
                places.setdefault(entry.where, set()).add(at)
        return places

    def with_repeats(self, entries: Collection[int]) -> set[int]:
        """These waits and all others of the same stream for the same event."""
        waits = [(at, e) for at, e in enumerate(self.log) if isinstance(e, Wait)]
        same = {(e.event, e.stream) for at, e in waits if at in entries}
        return {at for at, e in waits if (e.event, e.stream) in same}


class Watch(TorchDispatchMode):
    """Logs every access to memory with the recorder's current stream. `syncs`: how often the host waits."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder, self.syncs = recorder, 0
        self._block: dict[int, int] = {}  # storage -> the block of memory that it has now
        self._stream_of: dict[int, int] = {}  # block -> the stream that allocated it
        self._blocks = 0
        self._patches: list[Any] = []

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
            self.syncs += 1
            return tolist(tensor)

        def copied(*args: Any, **options: Any) -> Tensor:
            self.syncs += "device" in options and "pin_memory" not in options  # the host waits for such a copy
            tensor = tensor_of(*args, **options)
            if tensor.numel():
                self._kernel("from the host", set(), {self._block_of(tensor.untyped_storage(), fresh=True)})
            return tensor

        self._patches = [
            mock.patch.object(UntypedStorage, "resize_", resized),
            mock.patch.object(Tensor, "tolist", listed),
            mock.patch.object(torch, "tensor", copied),
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
        self.syncs += func is torch.ops.aten._local_scalar_dense.default or waits_for_sizes(func, args)
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
        writes = {self._block_of(t.untyped_storage()) for t in written if t.untyped_storage().nbytes()}
        reads = {self._block_of(t.untyped_storage()) for t in read if t.untyped_storage().nbytes()}
        if reads or writes:
            self._kernel(str(func), reads - writes, writes)
        return result

    def _kernel(self, name: str, reads: set[int], writes: set[int]) -> None:
        self.recorder.log.append(Kernel(name, self.recorder.current(), frozenset(reads), frozenset(writes)))

    def _block_of(self, storage: UntypedStorage, fresh: bool = False) -> int:
        """`fresh`: a block not seen before was allocated now, on the current stream, else before all, on the first."""
        key = storage._cdata
        if key not in self._block:
            self._blocks += 1
            self._block[key] = self._blocks
            self._stream_of[self._blocks] = self.recorder.current() if fresh else COMPUTE
            weakref.finalize(storage, self._freed, key, self._blocks).atexit = False
        return self._block[key]

    def _freed(self, key: int, block: int | None = None) -> None:
        """The allocating stream may have the block's memory for something else from now on."""
        if block not in (None, self._block.get(key)):
            return  # it was given back by resize_ already
        block = self._block.pop(key, None)
        if block is not None:
            self.recorder.log.append(Kernel("free", self._stream_of[block], frozenset(), frozenset({block})))
            self.recorder.log.append(Free(block))


def caller() -> str:
    """Which of the three waits this is, and the innermost function outside `refimpl.comm` that wanted it.

    "inputs": the communication's stream waits for the caller's; "result": the caller's for the communication's;
    "buffer": whoever gets a buffer for its last user.
    """
    kinds = {"following": "inputs", "wait": "result", "take": "buffer", "followed_by": "buffer"}
    kind, frame = "", sys._getframe(1)
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


def waits_for_sizes(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether the host must know values before it knows the result or its shape. Repeats may be told the size."""
    name = func._schema.name.partition("::")[2]
    by_mask = name == "index" and any(t is not None and t.dtype == torch.bool for t in args[1])
    return by_mask or name in SIZED_BY_VALUES


@torch.no_grad()
def arrive(out: list[Tensor], sent: list[Tensor]) -> None:
    """Numbers of this rank's own, as torch 2.13's "fake" backend delivers. 2.11's leaves some outputs as they were."""
    if sent:
        own = torch.cat([t.flatten() for t in sent])
        for t in out:
            t.copy_(own[torch.arange(t.numel()) % own.numel()].view_as(t))


def races(log: list[Any], without: Collection[int] = ()) -> list[str]:
    """Pairs of accesses that nothing orders, in a log from which the entries of these numbers are missing."""
    handler, found = EventHandler(), []
    with mock.patch.object(traceback.StackSummary, "extract", return_value=traceback.StackSummary()):
        for at, entry in enumerate(log):
            if at in without:
                continue
            if isinstance(entry, Record):
                handler._handle_event_record(entry.event, entry.stream)
            elif isinstance(entry, Wait):
                handler._handle_event_wait(entry.event, entry.stream)
            elif isinstance(entry, Free):
                handler._handle_memory_deallocation(entry.block)
            else:
                aliases = {block: [] for block in entry.reads | entry.writes}
                found += handler._handle_kernel_launch(
                    entry.stream, set(entry.reads), set(entry.writes), set(), entry.name, aliases
                )
    pairs = [(error.previous_access, error.current_access) for error in found]
    return [f"{a.operator} on stream {a.stream}, {b.operator} on stream {b.stream}" for a, b in pairs]
