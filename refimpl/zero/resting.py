"""Gradients at rest: a shard's mean gradient waits for the step on a disk, cut as the parts that will use it are.

Its bytes are written when its reduction has arrived, inside backward, and read with the part: 4 bytes a parameter each
way in fp32, divided by N; every further micro-batch reads and writes as much again. In memory stay the buffers of those
that travel, so what a rank needs no longer grows with the model. The sum of squares is taken on the way out.
ZeRO-Infinity: Rajbhandari et al. 2021, arXiv:2104.07857, section 5.1. DeepSpeed: deepspeed/runtime/zero/stage3.py,
`partition_grads` with `swap_out_gradients`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from refimpl.offload.blocks import BlockFile, Record
from refimpl.offload.homes import Disk, away
from refimpl.offload.shelf import Shelf
from refimpl.zero.flat import Bucket
from refimpl.zero.update import sum_of_squares


class Resting:
    """The gradients of `buckets` between their reduction and the step."""

    def __init__(self, disk: Disk, most: int, buckets: set[Bucket]) -> None:
        """`most`: elements of a run, as in the parts of the update."""
        self.disk, self.most, self.buckets = disk, most, buckets
        self.shelves: dict[Bucket, Shelf] = {}
        self.squares: dict[Bucket, Tensor] = {}  # of what rests now: the sum of its squares, fp64

    def add(self, bucket: Bucket, mean: Tensor) -> Tensor:
        """mean [S] goes to the disk, added to what rests there; returns what stands for it: see `away`."""
        if bucket in self.squares:
            mean.add_(self.whole(bucket))
        self._put(bucket, mean)
        return away(mean)

    def whole(self, bucket: Bucket) -> Tensor:
        """A copy. -> [S]"""
        shelf = self.shelves[bucket]
        return shelf.read(bucket.mine.new_empty(shelf.numel, dtype=shelf.dtype))

    def change(self, bucket: Bucket, start: int, end: int, write: Callable[[Tensor], object]) -> None:
        """Let `write` change the elements start to end."""
        flat = self.whole(bucket)
        write(flat[start:end])
        self._put(bucket, flat)

    def run(self, bucket: Bucket, start: int) -> tuple[BlockFile, Record] | None:
        """Where the elements from `start`, where a part begins, rest; None if they do not."""
        if bucket not in self.squares:
            return None
        records = dict(self.shelves[bucket].runs)
        self.disk.arrived(records[start])
        return self.disk.file, records[start]

    def dtype(self, bucket: Bucket) -> torch.dtype:
        return self.shelves[bucket].dtype

    def clear(self) -> None:
        """They are used up."""
        self.squares = {}

    def _put(self, bucket: Bucket, flat: Tensor) -> None:
        if bucket in self.shelves:
            self.shelves[bucket].write(0, flat)
        else:
            self.shelves[bucket] = Shelf(self.disk, flat, self.most, ahead=False)
        self.squares[bucket] = sum_of_squares(flat, exact=True)
