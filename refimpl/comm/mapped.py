"""Memory that several ranks of one host see: a file without a name, made by one rank and mapped by its peers.

A rank hands out tensors in its own file (`Own.empty`), says where in it a tensor lies (`Own.place`), and reads in
place what lies in a peer's (`Mapped.at`). The file is long and empty: a page of it is memory from its first write until
its block is given back. Blocks have eight lengths an octave: what nobody writes to costs nothing, and free blocks serve
again however many sizes a program asks for. Nobody finds the file by name, and the kernel frees it with the last
process that maps it, however that ends: a SIGKILL leaves nothing behind. A rank finds a peer's file among the peer's
open ones, in /proc.
"""

import mmap
import os
import weakref

import torch
from torch import Tensor

SPACE = 1 << 38  # bytes of address space a file: 256 GB, of which pages come as they are written
DATA = 1 << 32  # where tensors begin; below are the words with which the ranks signal
Place = tuple[int, int]  # (offset, bytes)


class Mapped:
    """One rank's file as this process sees it, at `address`. `words`: its first part, as 64-bit integers."""

    def __init__(self, descriptor: int, words: int) -> None:
        """OSError if it cannot be mapped."""
        self._map = mmap.mmap(descriptor, SPACE)
        self.words = memoryview(self._map)[: 8 * words].cast("q")
        self.address: int = torch.frombuffer(self._map, dtype=torch.uint8, count=1).data_ptr()

    def at(self, place: Place, dtype: torch.dtype) -> Tensor:
        """What lies there, as a flat tensor."""
        offset, size = place
        if not size:
            return torch.empty(0, dtype=dtype, device="cpu")  # whatever the default device is
        return torch.frombuffer(self._map, dtype=dtype, count=size // dtype.itemsize, offset=offset)


class Own(Mapped):
    """This rank's file."""

    def __init__(self, words: int) -> None:
        self.descriptor = os.memfd_create("refimpl")
        weakref.finalize(self, os.close, self.descriptor)
        os.ftruncate(self.descriptor, SPACE)
        super().__init__(self.descriptor, words)
        self._end = DATA
        self._free: dict[int, list[int]] = {}  # bytes of a block -> where such blocks are free
        self._left = False

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A [numel] tensor in this file. Its memory goes back to the system with the last tensor that shares it.

        MemoryError if the file is full.
        """
        if not numel:
            return torch.empty(0, dtype=dtype, device="cpu")  # a byte for nothing is what torch.load would refuse
        length = numel * dtype.itemsize
        step = max(mmap.PAGESIZE, 1 << length.bit_length() >> 4)
        size = -(-length // step) * step
        free = self._free.setdefault(size, [])
        if not free and self._end + size > SPACE:
            raise MemoryError(
                f"no room for {length} bytes in the {SPACE} that ranks share: free tensors, or set "
                "REFIMPL_TRANSPORT=gloo"
            )
        if free:
            offset = free.pop()
        else:
            offset, self._end = self._end, self._end + size
        block = memoryview(self._map)[offset : offset + length]
        weakref.finalize(block, self._give_back, offset, size).atexit = False
        return torch.frombuffer(block, dtype=dtype)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in this file, or has no elements."""
        return not tensor.numel() or (tensor.device.type == "cpu" and 0 <= tensor.data_ptr() - self.address < SPACE)

    def place(self, tensor: Tensor) -> Place:
        """Where a contiguous tensor lies in this file."""
        return tensor.data_ptr() - self.address, tensor.numel() * tensor.element_size()

    def leave(self) -> None:
        """Touch nothing any more: this rank is through, a peer may still read. The file ends with the last of them."""
        self._left = True

    def _give_back(self, offset: int, size: int) -> None:
        if not self._left:
            self._map.madvise(mmap.MADV_REMOVE, offset, size)
            self._free[size].append(offset)


def of_peer(pid: int, descriptor: int, words: int) -> Mapped:
    """A peer's file, by the number that it has among the peer's open ones. OSError if this process may not open it."""
    mine = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return Mapped(mine, words)
    finally:
        os.close(mine)
