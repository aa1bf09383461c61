"""How the bytes of a group's collectives travel: what stands below `Group`, one class for each way.

    Alone      one rank: a copy, or nothing
    Shared     memory that the ranks of one host map, sums in rank order (tensors on the CPU)
    Composed   transfers of torch.distributed, sums in rank order (gloo; any library with `deterministic=True`)
    Native     the library's own collectives (NCCL)

`Group` checks the call, announces it, counts its bytes; the transport starts transfers. Every collective here is a
generator of steps (see `Work`) over flat, contiguous tensors whose sizes fit.
"""

from abc import ABC, abstractmethod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from refimpl.comm.collectives import Op
from refimpl.comm.work import Steps


class Transport(ABC):
    """`size` ranks, of which this one is number `rank`."""

    in_halves = False  # whether an all-reduce is two transfers, the second of which must be started

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    @abstractmethod
    def all_reduce(self, x: Tensor, op: Op) -> Steps:
        """x [n] -> its reduction over ranks, in place, the same bits on every rank."""

    @abstractmethod
    def reduce_scatter(self, out: Tensor, x: Tensor, op: Op) -> Steps:
        """x [N*s] -> out [s], this rank's chunk of the reduction. `out` may be that chunk of x."""

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

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory from which the collectives of these ranks go the shortest way. A flat tensor, not resizable."""
        return torch.empty(numel, dtype=dtype, device=device)

    def scratch(self) -> list[Tensor]:
        """Buffers kept between calls."""
        return []


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

    def send(self, x: Tensor, to: int) -> Steps:
        raise AssertionError("there is no other rank")

    def recv(self, x: Tensor, source: int) -> Steps:
        raise AssertionError("there is no other rank")

    def _copy(self, out: Tensor, x: Tensor) -> Steps:
        if out.data_ptr() != x.data_ptr():
            out.copy_(x)
        yield from ()


class Library(Transport):
    """What torch.distributed does alike with every library. `name`: of the process group."""

    def __init__(self, handle: dist.ProcessGroup) -> None:
        super().__init__(handle.rank(), handle.size())
        self._name = handle.group_name

    @property
    def handle(self) -> dist.ProcessGroup:
        """torch's group, looked up by name: who still holds one when Python exits makes the process abort."""
        return distributed_c10d._resolve_process_group(self._name)  # type: ignore[attr-defined]

    def all_to_all(self, out: Tensor, x: Tensor, out_splits: list[int] | None, in_splits: list[int] | None) -> Steps:
        yield lambda: [dist.all_to_all_single(out, x, out_splits, in_splits, group=self.handle, async_op=True)]

    def broadcast(self, x: Tensor, root: int) -> Steps:
        yield lambda: [dist.broadcast(x, group=self.handle, group_src=root, async_op=True)]

    def send(self, x: Tensor, to: int) -> Steps:
        yield lambda: [dist.isend(x, group=self.handle, group_dst=to)]

    def recv(self, x: Tensor, source: int) -> Steps:
        yield lambda: [dist.irecv(x, group=self.handle, group_src=source)]
