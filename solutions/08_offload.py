"""Chapter 08, offload: state that rests on a disk, comes in parts, and goes back while the next
is computed with.

`disk` is a refimpl LateDisk: a real file that, as one opened with O_DIRECT, takes whole pages
only. Offset, length and memory address of a transfer are multiples of PAGE, or it is an
OSError.

    memory = disk.buffer(nbytes)            # uint8 [nbytes, rounded up to pages], page-aligned
    transfer = disk.read(offset, memory)    # begins to fill memory [n] from offset on
    transfer = disk.write(offset, memory)   # begins to write memory [n], which must not change
    transfer.wait()                         # until it is done

It does everything as late as it may: until a read was waited for, its memory holds 0xFF in
every byte.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from refimpl.grading.drive import PAGE, LateDisk, Transfer


def write_bytes(disk: LateDisk, start: int, data: Tensor) -> None:
    """data, uint8 [n], n > 0, to the bytes of the file from `start` on, by transfers of whole
    pages; done at return.

    What stands beside it in its first and its last page keeps its values. For that a page is
    read which data covers in part, and no other; the pages that data touches, and no others,
    are written in one transfer. data keeps its values.
    Example: 5000 bytes from 4000 on touch pages 0 to 2; pages 0 and 2 are read, all three are
    written.
    """
    end = start + len(data)
    first, last = start // PAGE, (end - 1) // PAGE
    memory = disk.buffer((last + 1 - first) * PAGE)
    covered_in_part = {first} if start % PAGE else set()
    covered_in_part |= {last} if end % PAGE else set()
    for page in covered_in_part:
        at = (page - first) * PAGE
        disk.read(page * PAGE, memory[at : at + PAGE]).wait()
    memory[start - first * PAGE : end - first * PAGE] = data
    disk.write(first * PAGE, memory).wait()


class CheckedBlocks:
    """Blocks of `size` bytes on a disk that may lie: one that comes back other than it was last
    written is an error.

    Disks flip a bit, write a block to another block's place, or say that they wrote and did
    not. In memory are kept at most 64 bytes a block, whatever its size.
    """

    def __init__(self, disk: LateDisk, size: int) -> None:  # given
        self.disk, self.size = disk, size
        self.sums: dict[int, int] = {}

    def write(self, k: int, memory: Tensor) -> None:
        """memory, uint8 [size], aligned -> block k, at k * size. Done at return."""
        self.sums[k] = zlib.crc32(memory.numpy())
        self.disk.write(k * self.size, memory).wait()

    def read(self, k: int, memory: Tensor) -> None:
        """Block k -> memory, uint8 [size], aligned.

        OSError that names k if it is not what was last written there. What was never written is
        not either. zlib.crc32(memory.numpy()) depends on every bit and on its place; a sum of
        the bytes does not tell their order.
        """
        self.disk.read(k * self.size, memory).wait()
        if self.sums.get(k) != zlib.crc32(memory.numpy()):
            raise OSError(f"block {k} is not what was written there")


def read_ahead(disk: LateDisk, places: Sequence[tuple[int, int]]) -> Iterator[Tensor]:
    """A generator: each place's bytes in turn, uint8 [nbytes], while the next place is being
    read.

    places: (offset, nbytes), whole pages; maybe none. When the bytes of one are handed out, the
    read of the next has begun, and nobody has waited for it. They stay as they are until the
    caller asks for more. Two buffers, each as large as the largest place, whatever there is to
    read. However it ends (a caller that stops early closes the generator; a disk fails), no
    transfer is left under way.
    """
    buffers = [disk.buffer(max((nbytes for _, nbytes in places), default=0)) for _ in range(2)]
    ahead: Transfer | None = None

    def begin(k: int) -> Transfer | None:
        if k == len(places):
            return None
        offset, nbytes = places[k]
        return disk.read(offset, buffers[k % 2][:nbytes])

    try:
        ahead = begin(0)
        for k in range(len(places)):
            assert ahead is not None
            now, ahead = ahead, None
            now.wait()
            ahead = begin(k + 1)
            yield now.memory
    finally:
        if ahead is not None:
            ahead.wait()


def update_parts(
    disk: LateDisk, places: Sequence[tuple[int, int]], update: Callable[[int, Tensor], None]
) -> None:
    """Each place's bytes are read, updated and written back, in three buffers, as much at once
    as these allow.

    places: (offset, nbytes), whole pages; maybe none. update(k, memory) changes memory, uint8
    [nbytes], in place. While part k is updated, k + 1 is being read and k - 1 is being written:
    both have begun, and nobody has waited for them. Three buffers, each as large as the largest
    place. At the end nothing is under way; after an error neither, and the parts that were
    updated before it are on the disk.

        r0 u0 w0 r3 u3 w3            one row a buffer, time to the right
           r1 u1 w1 r4 u4 w4
              r2 u2 w2 r5 u5 w5
    """
    buffers = [disk.buffer(max((nbytes for _, nbytes in places), default=0)) for _ in range(3)]
    reading: dict[int, Transfer] = {}
    writing: dict[int, Transfer] = {}

    def begin(k: int) -> None:
        if k - 3 in writing:
            writing.pop(k - 3).wait()
        if k < len(places):
            offset, nbytes = places[k]
            reading[k] = disk.read(offset, buffers[k % 3][:nbytes])

    try:
        begin(0)
        for k, (offset, nbytes) in enumerate(places):
            begin(k + 1)
            reading.pop(k).wait()
            memory = buffers[k % 3][:nbytes]
            update(k, memory)
            writing[k] = disk.write(offset, memory)
    finally:
        with ExitStack() as last:  # waits for every one, also if one fails
            for transfer in (*reading.values(), *writing.values()):
                last.callback(transfer.wait)


class DelayedUpdate:
    """An optimizer in the host's memory whose update runs beside the next forward and backward,
    one step late.

    The model's weights must not change while forward and backward run, so the optimizer has
    copies of its own, the masters. Weights w, gradients g, and update(w, g) what the optimizer
    makes of them:

        call of step()     1        2                  3                  ...
        gradients          g1(w0)   g2(w0)             g3(w1)
        weights after it   w0       w1=update(w0, g1)  w2=update(w1, g2)
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        optimizer: Callable[[list[Tensor]], torch.optim.Optimizer],
    ) -> None:  # given
        self.params = list(params)
        self.masters = [p.detach().clone().requires_grad_() for p in self.params]
        self.optimizer = optimizer(self.masters)
        # self.thread.submit(fn) begins fn and returns a Future.
        self.thread = ThreadPoolExecutor(1)
        self.under_way: Future[Any] | None = None  # .result() waits, and raises what fn raised

    def step(self) -> None:
        """Called in place of optimizer.step(): the update before goes to the model, into the
        memory that its weights have, and one by the gradients now begins.

        Nobody waits for the one that begins. The caller may set gradients to zero, or to None,
        at once: kept is one copy, and nothing of the model's own. A parameter without a
        gradient is not updated. What the optimizer raised is raised by the next call, here or
        in `finish`.
        """
        self.finish()
        for master, p in zip(self.masters, self.params, strict=True):
            master.grad = None if p.grad is None else p.grad.clone()
        self.under_way = self.thread.submit(self.optimizer.step)

    def finish(self) -> None:
        """Wait for the update under way, if any, and give its weights to the model.

        A second call does nothing.
        """
        if self.under_way is None:
            return
        update, self.under_way = self.under_way, None
        update.result()
        with torch.no_grad():
            for master, p in zip(self.masters, self.params, strict=True):
                p.copy_(master)


HINTS = {
    "write_bytes": [
        "Which is the first page that data touches, and which the last? Its last byte is start + n - 1.",
        "first = start // PAGE, last = (start + n - 1) // PAGE; a buffer for last + 1 - first pages.",
        "Read `first` if start % PAGE, `last` if (start + n) % PAGE; one page only once. Then copy data in.",
    ],
    "CheckedBlocks": [
        "Where must the sum of a block be kept, so that a disk which did not write at all is found out?",
        "A dict from k to zlib.crc32 of what was written, in memory; compare after the read was waited for.",
    ],
    "read_ahead": [
        "Draw two rows, one a buffer. In which does k + 1 arrive, and since when is that one free?",
        "When the caller asks for more, it is done with k - 1 ... and place k + 1 may be read into that buffer.",
        "wait for k, begin k + 1, yield k. Around it all: try ... finally, which waits for what has begun.",
    ],
    "update_parts": [
        "Which transfer must be over before k + 1 is read? Its buffer is number (k + 1) % 3.",
        "For each k: wait for write k - 2, begin read k + 1, wait for read k, update, begin write k.",
        "In `finally` wait for all that is still under way, reads as well, also if the wait for one of them fails.",
    ],
    "DelayedUpdate": [
        "step() has three parts: end the update before, hand gradients over, begin the next.",
        "The thread reads the gradients while the caller zeroes them: hand over copies.",
        "finish: .result(), then p.copy_(master) under torch.no_grad(), and forget the Future so that it happens once.",
    ],
}
