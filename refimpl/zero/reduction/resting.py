"""Gradients at rest: a shard's mean leaves inside backward, when its reduction has arrived, and waits elsewhere.

    home    it waits                                          bytes over the link, a parameter of the shard (fp32)
    Host    in host memory, pinned beside a GPU               4
    Disk    in runs, cut as the parts that will use it are    4 written, 4 read with the part
            every further micro-batch                         4 (Host), 4 read and 4 written (Disk)

With a disk what stays in memory are the buffers of those that travel: what a rank needs no longer grows with the model.
The sum of squares is taken on the way out. A disk that cannot take or give them is told to every rank before the
update: they are dropped, and the state is that of the last step. A run that comes back altered is found in the update,
beside its part: see offload/offloaded.py.
ZeRO-Offload: Ren et al. 2021, arXiv:2101.06840, section 4. ZeRO-Infinity: Rajbhandari et al. 2021, arXiv:2104.07857,
section 5.1. DeepSpeed: deepspeed/runtime/zero/stage3.py, `partition_grads`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from refimpl.checkpoint.errors import together
from refimpl.comm.group import Group
from refimpl.offload.blocks import BlockFile, OffloadError, Record
from refimpl.offload.homes import Disk, Host, away
from refimpl.offload.shelf import Shelf
from refimpl.zero.flat import Bucket
from refimpl.zero.update import sum_of_squares


class Resting:
    """The gradients of `buckets` between their reduction and the step, in host memory."""

    def __init__(self, home: Host, buckets: set[Bucket]) -> None:
        self.home, self.buckets = home, buckets
        self.squares: dict[Bucket, Tensor] = {}  # of what rests out of reach: the sum of its squares, fp64
        self._kept: dict[Bucket, Tensor] = {}  # [S], for the next step too
        self._full: set[Bucket] = set()  # what of it is in use
        self._leaving: torch.device | None = None  # where from copies are under way, if some are

    def add(self, bucket: Bucket, mean: Tensor) -> Tensor:
        """mean [S] goes there, added to what rests there; returns it, or what stands for it: see `away`.

        Backward goes on while it is copied, until `arrived`; if it is added, the host waits, which does that.
        """
        if bucket in self._full:
            self._kept[bucket].add_(mean.to(self._kept[bucket].device))
        elif bucket in self._kept:
            self._kept[bucket].copy_(mean, non_blocking=True)
            self._leaving = mean.device
        else:
            self._kept[bucket] = self.home.place(mean)
        self._full.add(bucket)
        return self._kept[bucket]

    def arrived(self) -> None:
        """Backward is over: return when what it has sent here can be read."""
        if self._leaving is not None and self._leaving.type != "cpu":
            torch.accelerator.synchronize(self._leaving)
        self._leaving = None

    def settle(self, group: Group) -> None:
        """Return when all of them are there; OffloadError on every rank of `group` if one has lost some."""

    def run(self, bucket: Bucket, start: int) -> tuple[BlockFile, Record] | None:
        """Where the elements from `start`, where a part begins, must be read; None: nowhere, they are in memory."""
        return None

    def whole(self, bucket: Bucket) -> Tensor:
        """What is out of reach, brought. -> [S]"""
        return self._kept[bucket]

    def change(self, bucket: Bucket, start: int, end: int, write: Callable[[Tensor], object]) -> None:
        """Let `write` change the elements start to end."""
        write(self._kept[bucket][start:end])

    def clear(self, held: Callable[[Bucket], bool]) -> None:
        """They are used up. What somebody holds a view of is his."""
        for bucket in [bucket for bucket in self._full if held(bucket)]:
            del self._kept[bucket]
        self._full = set()

    def memory(self) -> list[Tensor]:
        """Kept for the next step, and not in use."""
        return [flat for bucket, flat in self._kept.items() if bucket not in self._full]


class RestingOnDisk(Resting):
    """On a disk."""

    def __init__(self, disk: Disk, buckets: set[Bucket], most: int) -> None:
        """`most`: elements of a run, as in the parts of the update."""
        super().__init__(disk, buckets)
        self.disk, self.most = disk, most
        self.shelves: dict[Bucket, Shelf] = {}
        self.lost: OffloadError | None = None  # why some are not there

    def add(self, bucket: Bucket, mean: Tensor) -> Tensor:
        """As in `Resting`. Where the disk fails, backward goes on, as the others wait for it: `settle` tells."""
        try:
            if bucket in self.squares:
                mean.add_(self.whole(bucket))
            self._put(bucket, mean)
        except OffloadError as error:
            self.lost = self.lost or error
        return away(mean)

    def settle(self, group: Group) -> None:
        together(group, self._arrived, OffloadError)

    def whole(self, bucket: Bucket) -> Tensor:
        shelf = self.shelves[bucket]
        return shelf.read(bucket.mine.new_empty(shelf.numel, dtype=shelf.dtype))

    def change(self, bucket: Bucket, start: int, end: int, write: Callable[[Tensor], object]) -> None:
        flat = self.whole(bucket)
        write(flat[start:end])
        self._put(bucket, flat)

    def run(self, bucket: Bucket, start: int) -> tuple[BlockFile, Record] | None:
        if bucket not in self.squares:
            return None
        records = dict(self.shelves[bucket].runs)
        self.disk.arrived(records[start])
        return self.disk.file, records[start]

    def clear(self, held: Callable[[Bucket], bool]) -> None:
        self.squares, self.lost = {}, None

    def _arrived(self) -> None:
        try:
            self.disk.arrived()
        except OffloadError as error:
            self.lost = self.lost or error
        if self.lost is not None:
            raise self.lost

    def _put(self, bucket: Bucket, flat: Tensor) -> None:
        if bucket in self.shelves:
            self.shelves[bucket].write(0, flat)
        else:
            self.shelves[bucket] = Shelf(self.disk, flat, self.most, ahead=False)
        self.squares[bucket] = sum_of_squares(flat, exact=True)
