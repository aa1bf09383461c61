"""How the bytes of a group's collectives travel: what stands below `Group`, one class for each way.

    Alone      one rank: a copy, or nothing
    Shared     memory that the ranks of one host map, sums in rank order (tensors on the CPU)
    Composed   transfers of torch.distributed, sums in rank order (gloo; any library with `deterministic=True`)
    Native     the library's own collectives (NCCL)
    Throttled  Composed's, each message as late as a slow link would have it
    ByLevels   near ranks first, then far ones, by any algorithm

`Group` checks the call, announces it, counts its bytes; the transport starts transfers. Every collective here is a
generator of steps (see `Work`) over flat, contiguous tensors whose sizes fit. On a GPU the steps run on the lane of the
transport, a stream of its own: each starts when what the caller's stream was given before it is done.
"""

from abc import ABC, abstractmethod
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from refimpl.comm.collectives import Op
from refimpl.comm.process_group import by_name
from refimpl.comm.streams import Lane, Streams, lane_of
from refimpl.comm.work import Steps

KNOWN = (torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64)  # and floating ones of two bytes or more
SAME_SIZE = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}


class Transport(ABC):
    """`size` ranks, of which this one is number `rank`."""

    in_halves = False  # whether an all-reduce is two transfers, the second of which the host must start
    gathers_lists = True  # whether an all-gather into separate tensors is as fast as into one buffer
    lane: Lane | None = None  # where there are streams: the one that the steps run on

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    @abstractmethod
    def all_reduce(self, x: Tensor, op: Op) -> Steps:
        """x [n] -> its reduction over ranks, in place, the same bits on every rank."""

    @abstractmethod
    def reduce_scatter(self, out: Tensor, x: Tensor, op: Op) -> Steps:
        """x [N*s] -> out [s], this rank's chunk of the reduction. `out` may be that chunk of x, or of a wider dtype."""

    @abstractmethod
    def all_gather(self, chunks: list[Tensor], x: Tensor) -> Steps:
        """x [s] of every rank -> chunks, N tensors [s]. x may be chunks[rank]."""

    @abstractmethod
    def all_to_all(self, out: Tensor, x: Tensor, out_splits: list[int] | None, in_splits: list[int] | None) -> Steps:
        """Rank r's chunk i of x becomes rank i's chunk r of out; splits count rows."""

    @abstractmethod
    def broadcast(self, x: Tensor, root: int) -> Steps:
        """x of rank `root` -> x."""

    @abstractmethod
    def send(self, x: Tensor, to: int) -> Steps: ...

    @abstractmethod
    def recv(self, x: Tensor, source: int) -> Steps: ...

    @abstractmethod
    def send_recv(self, x: Tensor, to: int, out: Tensor, source: int) -> Steps:
        """Both at once: neither waits for the other to begin."""

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory from which the collectives of these ranks go the shortest way. A flat tensor, not resizable."""
        return torch.empty(numel, dtype=dtype, device=device)

    def crossed_behind(self) -> int:
        """Bytes over slow links of the collectives that have ended since it was asked last, if begun by others."""
        return 0

    def scratch(self) -> list[Tensor]:
        """Buffers kept between calls."""
        return []

    def trim(self) -> None:  # noqa: B027
        """Give back the buffers that were kept: what comes now is of other sizes. On every rank."""

    def advance(self) -> None:  # noqa: B027
        """Let what was begun go on, where it needs this rank's own hands: for who waits for something else."""


class Alone(Transport):
    """A group of one rank, which sends nothing."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    def all_reduce(self, x: Tensor, op: Op) -> Steps:
        yield from ()

    def reduce_scatter(self, out: Tensor, x: Tensor, op: Op) -> Steps:
        yield from self._copy(out, x)

    def all_gather(self, chunks: list[Tensor], x: Tensor) -> Steps:
        yield from self._copy(chunks[0], x)

    def all_to_all(self, out: Tensor, x: Tensor, out_splits: list[int] | None, in_splits: list[int] | None) -> Steps:
        yield from self._copy(out, x)

    def broadcast(self, x: Tensor, root: int) -> Steps:
        yield from ()

    def send(self, *_: Any, **__: Any) -> Steps:
        """Never called: to `Group` there is no other rank."""
        raise AssertionError

    recv = send_recv = send

    def _copy(self, out: Tensor, x: Tensor) -> Steps:
        if out.data_ptr() != x.data_ptr():
            out.copy_(x)
        yield from ()


class Library(Transport):
    """What torch.distributed does alike with every library, the process group `handle` behind it.

    gloo's transfers are waited for by the host. NCCL's are queued on the current stream, which is the lane, and leave
    the host nothing to wait for.
    """

    def __init__(self, handle: dist.ProcessGroup, backend: str, streams: Streams) -> None:
        super().__init__(handle.rank(), handle.size())
        self._name = handle.group_name
        self.host_waits = backend == "gloo"
        self.lane = lane_of(streams)

    @property
    def handle(self) -> dist.ProcessGroup:
        """torch's group."""
        return by_name(self._name)

    def start(self, transfer: Any, *args: Any, **options: Any) -> list[Any]:
        """Start one of torch.distributed's collectives that move; what the host must wait for."""
        return self.begin(transfer, *(movable(arg) if isinstance(arg, Tensor) else arg for arg in args), **options)

    def begin(self, transfer: Any, *args: Any, **options: Any) -> list[Any]:
        """The same, of tensors as they are: for what is added up."""
        handle = transfer(*args, **options, group=self.handle, async_op=self.host_waits)
        return [] if handle is None else [handle]

    def all_to_all(self, out: Tensor, x: Tensor, out_splits: list[int] | None, in_splits: list[int] | None) -> Steps:
        yield lambda: self.start(dist.all_to_all_single, out, x, out_splits, in_splits)

    def broadcast(self, x: Tensor, root: int) -> Steps:
        yield lambda: self.start(dist.broadcast, x, group_src=root)

    def send(self, x: Tensor, to: int) -> Steps:
        there = self._on_wire(x)
        yield lambda: [dist.isend(there, group=self.handle, group_dst=to)]

    def recv(self, x: Tensor, source: int) -> Steps:
        here = self._on_wire(x)
        yield lambda: [dist.irecv(here, group=self.handle, group_src=source)]
        if here.device != x.device:
            x.copy_(here)

    def send_recv(self, x: Tensor, to: int, out: Tensor, source: int) -> Steps:
        """NCCL runs unbatched sends of a group one after the other: if all ranks send first, none receives.

        A batch goes by the communicator of the whole group, which is made by the group's first call unless the group
        is bound to a device: of a batch that some ranks alone call all would wait for the others. Two ranks that swap
        then take turns, by a communicator of their own.
        """
        there, here = self._on_wire(x), self._on_wire(out)

        def both() -> list[Any]:
            group = self.handle
            if to == source and not self.host_waits and self.size > 2 and group.bound_device_id is None:
                sending = partial(dist.isend, there, group=group, group_dst=to)
                receiving = partial(dist.irecv, here, group=group, group_src=source)
                return [call() for call in ([sending, receiving] if self.rank < to else [receiving, sending])]
            ops = [
                dist.P2POp(dist.isend, there, group=group, group_peer=to),
                dist.P2POp(dist.irecv, here, group=group, group_peer=source),
            ]
            return list(dist.batch_isend_irecv(ops))

        yield both
        if here.device != out.device:
            out.copy_(here)

    def _on_wire(self, x: Tensor) -> Tensor:
        """x where the library can read and fill it: gloo's send and recv hand its address to a socket."""
        return x.cpu() if self.host_waits else movable(x)


def movable(x: Tensor) -> Tensor:
    """x, or its bytes under a dtype that gloo and NCCL know: not int16, large unsigned numbers and some float8."""
    fine = x.is_complex() or x.dtype in KNOWN or (x.is_floating_point() and x.element_size() > 1)
    return x if fine else x.view(SAME_SIZE[x.element_size()])
