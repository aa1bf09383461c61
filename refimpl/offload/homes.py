"""Where a rank's shards rest between their uses: on the device, in the host's memory, or on a disk.

    home    fp32 masters and optimizer state rest   the update runs       bytes a step over the link, a parameter
    (none)  where the model is                      there                 0
    Host    in the host's memory (pinned)           on the host's cores   2 or 4 up (gradient), 2 or 4 up (weight: was
                                                                          it written to?), 2 or 4 down (weight)
    Disk    in a file of this rank                  on the host's cores   12 read and 12 written with AdamW

On a CPU the device's memory is the host's: `Host` then keeps fp32 masters apart from the model's weights and moves
nothing else. All figures are for this rank's shard: divide by N.
ZeRO-Offload: Ren et al. 2021, arXiv:2101.06840. ZeRO-Infinity: Rajbhandari et al. 2021, arXiv:2104.07857.
DeepSpeed: deepspeed/runtime/zero/offload_config.py and deepspeed/runtime/swap_tensor/.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from refimpl.offload.blocks import Aio, BlockFile, Buffer, OffloadError, Record, Transfer, pages
from refimpl.offload.pipeline import pipelined, settle


class Kept(Protocol):
    """A run of this rank's state that comes and goes as one."""

    record: Record | None
    most: int  # bytes that its record may ever take
    beside: tuple[BlockFile, Record] | None  # read behind `most` bytes of the buffer, and not written back

    @property
    def nbytes(self) -> int:
        """Bytes that it takes now."""

    @property
    def room(self) -> int:
        """Bytes of a buffer for it and for what is read beside it."""

    def attach(self, buffer: Buffer) -> None:
        """It has been read into this buffer: live there."""

    def detach(self, buffer: Buffer) -> None:
        """Have all of it in this buffer, to be written, and nothing elsewhere."""


Part = TypeVar("Part", bound=Kept)
Seen = tuple[Callable[[], Kept | None], Buffer | None]
NOTHING: Seen = (lambda: None), None


class Host:
    """In the host's memory, pinned where there is a GPU, so that copies run beside its kernels."""

    def place(self, tensor: Tensor) -> Tensor:
        """A copy of `tensor` that rests here."""
        there = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
        return there.copy_(tensor)

    def admit(self, part: Kept) -> None:
        """From now on the part rests here."""

    def rounds(self, parts: Iterable[Part], back: bool = True) -> Iterator[Part]:
        """Each part in turn while it can be computed with; what was changed is kept, if `back`."""
        yield from parts

    def renewed(self) -> None:
        """What rests here is about to be replaced: nothing of it can be lost."""

    def arrived(self, *records: Record) -> None:
        """Wait for what is on its way there: nothing is."""

    def memory(self) -> list[Tensor]:
        """Buffers of its own."""
        return []


class Disk(Host):
    """In a file of this rank's in `folder`, brought into `buffer_count` buffers of host memory in turn.

    `buffer_count` 3 lets a part be updated while the next is read and the one before written, 4 keeps the disk busy
    both ways meanwhile; 1 does it all in turn.
    """

    def __init__(
        self, folder: str | Path, buffer_count: int = 4, aio: Aio | None = None, buffer_size: int | None = None
    ) -> None:
        """OffloadError if no file can be made in `folder`. `buffer_size`: bytes that no buffer may exceed."""
        if not isinstance(buffer_count, int) or buffer_count < 1:
            raise ValueError(f"buffer_count = {buffer_count}: must be a whole number, at least 1")
        self.buffer_size = buffer_size
        self.file = BlockFile(Path(folder), aio)
        self.buffer_count = buffer_count
        self.buffers: list[Buffer] = []  # for `rounds`
        self.seen: Seen = NOTHING  # the last part that was only looked at, and the buffer that has it still
        self.turn = threading.RLock()  # whose they are: two stages may share a disk, and one be late
        self.ahead: list[Buffer] = []  # free, for what is read before it is needed: see `Shelf`
        self.spare = Buffer(0)  # for what nobody foresaw
        self.leaving: deque[tuple[Record | None, Buffer, Transfer]] = deque()  # what `send` writes, the oldest first

    def __reduce__(self) -> tuple[type, tuple[Path, int, Aio, int | None]]:
        """Another process opens a file of its own."""
        return type(self), (self.file.folder, self.buffer_count, self.file.aio, self.buffer_size)

    def admit(self, part: Kept) -> None:
        """Write the part for the first time. OffloadError if the disk has no room for the most it may ever take."""
        with self.turn:
            part.record = self.file.record(part.most)
            if not self.buffers or len(self.buffers[0].view) < part.room:
                self.buffers = self._buffers(part.room)  # none is in use between two rounds
            self.seen = NOTHING
            self._write(part, self.buffers[0]).wait()

    def rounds(self, parts: Iterable[Part], back: bool = True) -> Iterator[Part]:
        """Each part in turn while it is in memory; written back beside the next one: see `pipelined`."""
        with self.turn:
            parts, last = list(parts), NOTHING
            for part, buffer in pipelined(parts, *self._unless_seen(parts), self._write if back else self._leave):
                part.attach(buffer)
                last = weakref.ref(part), buffer
                yield part
            self.seen = NOTHING if back else last

    def expect(self, nbytes: int) -> None:
        """A shelf of so many bytes will be read ahead: between two transfers of others."""
        if not self.ahead or len(self.ahead[0].view) < nbytes:
            self.ahead = self._buffers(nbytes)

    def unforeseen(self, nbytes: int) -> Buffer:
        """The one buffer for what is read at once."""
        if len(self.spare.view) < nbytes:
            self.spare = Buffer(nbytes)
        return self.spare

    def send(self, record: Record, values: Tensor, dtype: torch.dtype) -> None:
        """Begin to write a copy of `values` [n]. Two are under way at most; an error shows, once, at the next one."""
        if not self.leaving or len(self.leaving[0][1].view) < record.nbytes:
            self.arrived()
            self.leaving = deque((None, Buffer(record.nbytes), Transfer([])) for _ in range(2))
        _, buffer, before = self.leaving[0]
        before.wait()
        buffer.bytes.view(dtype)[: values.numel()] = values
        self.leaving.popleft()
        self.leaving.append((record, buffer, self.file.write(record, buffer)))

    def renewed(self) -> None:
        """What rests here is about to be replaced: what was lost of it is no error any more."""
        with self.turn:
            for _, _, transfer in self.leaving:
                settle(transfer)
            self.leaving.clear()
            self.seen = NOTHING
            self.file.forget()

    def arrived(self, *records: Record) -> None:
        """Wait for what was sent to these records, or for all. OffloadError, once, if some of it was not written."""
        ways = [transfer for record, _, transfer in self.leaving if not records or record in records]
        Transfer([block for way in ways for block in way.taken()]).wait()

    def memory(self) -> list[Tensor]:
        leaving = [buffer for _, buffer, _ in self.leaving]
        return [buffer.bytes for buffer in (*self.buffers, *self.ahead, *leaving, self.spare)]

    def _buffers(self, nbytes: int) -> list[Buffer]:
        if self.buffer_size is not None and nbytes > self.buffer_size:
            raise OffloadError(
                f"{nbytes:,} bytes are brought from the disk at a time, and a buffer holds {self.buffer_size:,}: raise "
                "buffer_size, use more ranks, or shard smaller modules"
            )
        return [Buffer(nbytes) for _ in range(self.buffer_count)]

    def _unless_seen(self, parts: list[Part]) -> tuple[list[Buffer], Callable[[Part, Buffer], Transfer]]:
        """The buffers, and how a part is read into one: not at all, if it comes first and was seen last.

        A save asks for a part once for each parameter in it.
        """
        (seen, has_it), self.seen = self.seen, NOTHING
        here = parts[0] if parts and seen() is parts[0] and parts[0].beside is None else None
        buffers = sorted(self.buffers, key=lambda buffer: here is None or buffer is not has_it)
        return buffers, lambda part, buffer: Transfer([]) if part is here else self._read(part, buffer)

    def _read(self, part: Kept, buffer: Buffer) -> Transfer:
        blocks = self.file.read(self._used(part), buffer).blocks
        if part.beside is not None:
            file, record = part.beside
            blocks = [*blocks, *file.read(record, buffer, pages(part.most)).blocks]
        return Transfer(blocks)

    def _write(self, part: Kept, buffer: Buffer) -> Transfer:
        part.detach(buffer)
        return self.file.write(self._used(part), buffer)

    def _leave(self, part: Kept, buffer: Buffer) -> Transfer:
        part.detach(buffer)
        return Transfer([])

    def _used(self, part: Kept) -> Record:
        assert part.record is not None
        return Record(part.record.offset, pages(part.nbytes))


def away(tensor: Tensor) -> Tensor:
    """What stands for a tensor that is not here: its shape, and NaN."""
    nothing = float("nan") if tensor.dtype.is_floating_point else 0
    return tensor.new_full((), nothing).expand(tensor.shape)


def is_here(tensor: Tensor) -> bool:
    """Whether it has memory: what rests on a disk is only seen in its shape, see `away`."""
    return tensor.untyped_storage().nbytes() >= tensor.nbytes
