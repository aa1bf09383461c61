"""A shelf: a flat tensor that rests elsewhere, read whole when it is needed and written run by run.

    Shelf        on a disk
    HostShelf    in the host's memory, of a tensor whose device is another: 2 or 4 bytes a parameter over the link

On a disk:

    state      memory            what ends it
    away       none              `begin`, `read`
    reading    one buffer        `read`, `drop`

`begin` is for what will be needed soon: the disk works meanwhile. How many may be read ahead is the home's
`buffer_count`; one buffer more is for what nobody foresaw. Writes go on behind the caller's back (`Disk.send`); whoever
reads what is still being written waits for it. ZeRO-3 keeps a unit's shard like this (`offload_param`). On a GPU the
buffers are in the host's memory, not pinned: a read or a write waits for the GPU.
DeepSpeed: deepspeed/runtime/swap_tensor/partitioned_param_swapper.py.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from refimpl.offload.blocks import Buffer, Record, Transfer
from refimpl.offload.homes import Disk, Host
from refimpl.offload.pipeline import settle


class Shelf:
    """`flat` [S], on `disk` from now on, in runs of `most` elements."""

    def __init__(self, disk: Disk, flat: Tensor, most: int, ahead: bool = True) -> None:
        """OffloadError if the disk has no room. `ahead`: whether it will be read before it is needed."""
        self.disk, self.dtype, self.numel, self.most = disk, flat.dtype, flat.numel(), most
        self.runs: list[tuple[int, Record]] = []  # where each begins
        self.was_written = False  # from outside, since the last update
        self._reading: tuple[Buffer, Sequence[Transfer]] | None = None
        for start in range(0, self.numel, most):
            numel = min(most, self.numel - start)
            self.runs.append((start, disk.file.record(numel * self.dtype.itemsize)))
        self.nbytes = sum(record.nbytes for _, record in self.runs)
        if ahead:
            disk.expect(self.nbytes)
        self.write(0, flat)

    def like(self, flat: Tensor) -> "Shelf":
        """One at the same place, of `flat`, which takes this one's."""
        return Shelf(self.disk, flat, self.most)

    @property
    def is_begun(self) -> bool:
        return self._reading is not None

    def begin(self) -> None:
        """Begin to read, if there is a buffer for it."""
        if self._reading is None and self.disk.ahead:
            self._reading = self._begin(self.disk.ahead.pop())

    def read(self, out: Tensor) -> Tensor:
        """Fill out [S], and return it."""
        buffer, transfers = self._reading or self._begin(self.disk.unforeseen(self.nbytes))
        try:
            for transfer in transfers:
                transfer.wait()
            at = 0
            for (start, record), end in zip(self.runs, self._ends(), strict=True):
                size = (end - start) * self.dtype.itemsize
                out[start:end] = buffer.bytes[at : at + size].view(self.dtype)
                at += record.nbytes
        finally:
            self.drop()
        return out

    def drop(self) -> None:
        """It was not needed after all."""
        if self._reading is not None:
            (buffer, transfers), self._reading = self._reading, None
            for transfer in transfers:
                settle(transfer)
            self.disk.ahead.append(buffer)

    def write(self, start: int, values: Tensor) -> None:
        """Replace the elements from `start`, where a run begins, by these, which end where one ends."""
        for (first, record), end in zip(self.runs, self._ends(), strict=True):
            if start <= first and end <= start + values.numel():
                self.disk.arrived(record)
                self.disk.send(record, values[first - start : end - start], self.dtype)

    def tensors(self) -> Sequence[Tensor]:
        """What of it is in memory: nothing."""
        return ()

    def _ends(self) -> list[int]:
        return [*(start for start, _ in self.runs[1:]), *([self.numel] if self.runs else [])]

    def _begin(self, buffer: Buffer) -> tuple[Buffer, list[Transfer]]:
        transfers, at = [], 0
        self.disk.arrived(*(record for _, record in self.runs))
        for _, record in self.runs:
            transfers.append(self.disk.file.read(record, buffer, at))
            at += record.nbytes
        return buffer, transfers


class HostShelf(Shelf):
    """`flat` [S] in the host's memory from now on, pinned beside a GPU."""

    is_begun = True  # there is nothing to read ahead

    def __init__(self, host: Host, flat: Tensor) -> None:
        self.host, self.kept, self.device = host, host.place(flat), flat.device
        self.was_written = False

    def like(self, flat: Tensor) -> Shelf:
        return HostShelf(self.host, flat)

    def begin(self) -> None:
        """Nothing: the copy takes its turn in the queue of the stream that gathers."""

    def read(self, out: Tensor) -> Tensor:
        return out.copy_(self.kept, non_blocking=True)

    def drop(self) -> None:
        """Nothing: see `begin`."""

    def write(self, start: int, values: Tensor) -> None:
        torch.accelerator.synchronize(self.device)  # a copy of what was here may still be queued
        self.kept[start : start + values.numel()] = values

    def tensors(self) -> Sequence[Tensor]:
        """Its memory."""
        return (self.kept,)
