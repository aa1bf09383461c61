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
    raise NotImplementedError("write_bytes")


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
        raise NotImplementedError("CheckedBlocks.write")

    def read(self, k: int, memory: Tensor) -> None:
        """Block k -> memory, uint8 [size], aligned.

        OSError that names k if it is not what was last written there. What was never written is
        not either. zlib.crc32(memory.numpy()) depends on every bit and on its place; a sum of
        the bytes does not tell their order.
        """
        raise NotImplementedError("CheckedBlocks.read")


def read_ahead(disk: LateDisk, places: Sequence[tuple[int, int]]) -> Iterator[Tensor]:
    """A generator: each place's bytes in turn, uint8 [nbytes], while the next place is being
    read.

    places: (offset, nbytes), whole pages; maybe none. When the bytes of one are handed out, the
    read of the next has begun, and nobody has waited for it. They stay as they are until the
    caller asks for more. Two buffers, each as large as the largest place, whatever there is to
    read. However it ends (a caller that stops early closes the generator; a disk fails), no
    transfer is left under way.
    """
    raise NotImplementedError("read_ahead")


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
    raise NotImplementedError("update_parts")


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
        raise NotImplementedError("DelayedUpdate.step")

    def finish(self) -> None:
        """Wait for the update under way, if any, and give its weights to the model.

        A second call does nothing.
        """
        raise NotImplementedError("DelayedUpdate.finish")
