"""A disk for exercises: a real file that takes whole pages only, and does everything as late as it may.

As a file opened with O_DIRECT it refuses what is not aligned: the offset, the length, the memory's address. A transfer
is done when somebody waits for it, and not before. Until then a buffer that is read into holds 0xFF in every byte, and
a buffer that is written must not change. So whatever is done too early shows, in every run alike, without a thread.

    disk = LateDisk()
    memory = disk.buffer(8192)                  # uint8 [8192], page-aligned
    way = disk.write(0, memory)                 # begins
    way.wait()                                  # ends
"""

import errno
import mmap
import os
import tempfile
import weakref
from typing import Literal

import torch
from torch import Tensor

from refimpl.grading.compare import Wrong

PAGE = 4096  # bytes
EMPTY = 0xFF  # what a buffer holds while it is read into

Event = tuple[str, int]  # ("read begins", offset), ("read ends", offset), and of writes alike; or what others note


class Transfer:
    """Bytes on their way."""

    def __init__(self, disk: "LateDisk", kind: Literal["read", "write"], offset: int, memory: Tensor) -> None:
        self.disk, self.kind, self.offset, self.memory = disk, kind, offset, memory
        self.before = memory.clone() if kind == "write" else None

    def wait(self) -> None:
        """It is done now; again: nothing. OSError if the disk is broken there."""
        if self in self.disk.under_way:
            self.disk.end(self)


class LateDisk:
    """One file, which begins empty: all zeros. `events` has everything in order, `buffers` all memory handed out."""

    def __init__(self) -> None:
        self.descriptor, name = tempfile.mkstemp()
        os.unlink(name)  # the file lives as long as its descriptor
        weakref.finalize(self, os.close, self.descriptor)
        self.events: list[Event] = []
        self.under_way: list[Transfer] = []
        self.log: list[tuple[str, int, int]] = []  # kind, offset and length of each transfer
        self.buffers: list[Tensor] = []
        self.broken: int | None = None  # offset at which every transfer fails
        self.fails = ("read", "write")  # of these kinds

    def buffer(self, nbytes: int) -> Tensor:
        """uint8 [nbytes, rounded up to pages], page-aligned, all EMPTY."""
        size = -(-max(nbytes, 1) // PAGE) * PAGE
        memory = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8).fill_(EMPTY)
        self.buffers.append(memory)
        return memory

    def read(self, offset: int, memory: Tensor) -> Transfer:
        """Begin to fill memory [n] with the file's bytes from `offset` on. OSError if anything is not aligned."""
        transfer = self._begin("read", offset, memory)
        memory.fill_(EMPTY)
        return transfer

    def write(self, offset: int, memory: Tensor) -> Transfer:
        """Begin to write memory [n] to the file at `offset`. It must stay as it is until it was waited for."""
        return self._begin("write", offset, memory)

    def end(self, transfer: Transfer) -> None:
        """What `Transfer.wait` does."""
        self.under_way.remove(transfer)
        self.events.append((f"{transfer.kind} ends", transfer.offset))
        if transfer.offset == self.broken and transfer.kind in self.fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if transfer.kind == "read":
            if not bool((transfer.memory == EMPTY).all()):
                raise Wrong(
                    f"memory was written to while bytes from offset {transfer.offset:,} were being read into it"
                )
            transfer.memory.copy_(self.peek(transfer.offset, len(transfer.memory)))
        else:
            if transfer.before is None or not torch.equal(transfer.memory, transfer.before):
                raise Wrong(
                    f"memory changed while it was being written to offset {transfer.offset:,}: "
                    "wait for the write before its buffer is used again"
                )
            self.poke(transfer.offset, transfer.memory)

    def peek(self, offset: int, nbytes: int) -> Tensor:
        """What the file holds, aligned or not; zeros beyond its end."""
        found = bytearray(os.pread(self.descriptor, nbytes, offset).ljust(nbytes, b"\0"))
        return torch.frombuffer(found, dtype=torch.uint8) if nbytes else torch.empty(0, dtype=torch.uint8)

    def poke(self, offset: int, values: Tensor) -> None:
        """Change the file behind everybody's back."""
        os.pwrite(self.descriptor, values.numpy().tobytes(), offset)

    def _begin(self, kind: Literal["read", "write"], offset: int, memory: Tensor) -> Transfer:
        refuse_odd(offset, memory)
        first, end = memory.data_ptr(), memory.data_ptr() + len(memory)
        for other in self.under_way:
            start = other.memory.data_ptr()
            if start < end and first < start + len(other.memory) and "read" in (kind, other.kind):
                raise Wrong(
                    f"a {kind} of offset {offset:,} begins in memory whose {other.kind} of offset {other.offset:,} is "
                    "still under way: wait for that first"
                )
        transfer = Transfer(self, kind, offset, memory)
        self.under_way.append(transfer)
        self.events.append((f"{kind} begins", offset))
        self.log.append((kind, offset, len(memory)))
        return transfer


def refuse_odd(offset: int, memory: Tensor) -> None:
    """OSError, as of a file opened with O_DIRECT, unless everything is a multiple of PAGE."""
    if memory.dtype != torch.uint8 or memory.ndim != 1 or not memory.is_contiguous():
        raise TypeError(f"memory must be contiguous uint8 [n], not {memory.dtype} {list(memory.shape)}")
    odd = {"offset": offset, "length": len(memory), "address": memory.data_ptr()}
    for name, value in odd.items():
        if value % PAGE or value < 0:
            raise OSError(errno.EINVAL, f"the {name} is {value % PAGE} bytes beyond a multiple of {PAGE}")
