"""Blocks on a disk: one file without a name, written and read past the page cache, a thread for each block in flight.

A record is a run of whole pages of the file. A transfer of it is cut into blocks of `block_size`; `queue_depth` of them
are under way at once, each in a thread that sleeps in the kernel while the disk works. O_DIRECT moves pages between the
disk and page-aligned memory past the page cache, which would otherwise keep a second copy of all that is offloaded.

The file has no name (O_TMPFILE, or unlinked at once): two runs in one folder never meet, a SIGKILL leaves nothing
behind, and nobody can cut it short. Its space is taken when a record is made (`posix_fallocate`): a full disk says so
before training begins, of gradients in the first step, which then changes nothing. Every block is summed as 64-bit
words when it is written, and compared when it is read, by the thread that computes with it: another would draw it into
its own cache, from where computing and the disk fetch it more slowly. The length and date that this process leaves tell
whether somebody else has changed the file since.

ZeRO-Infinity: Rajbhandari et al. 2021, arXiv:2104.07857, section 6.3 (DeepNVMe). DeepSpeed: csrc/aio, by libaio.
"""

import errno
import mmap
import os
import tempfile
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor

REMEDY = "go on from a checkpoint, on another disk"
PAGE = 4096  # bytes: what O_DIRECT moves at a time; a multiple of every disk's sector


class OffloadError(RuntimeError):
    """The disk cannot keep what it is given, or does not give back what it was given. Names folder and remedy."""


class OffloadWarning(UserWarning):
    """Offloading works, but not at full speed."""


@dataclass(frozen=True)
class Aio:
    """How a disk is driven, under DeepSpeed's names (section `aio`). Its defaults there are 1 MB and 8.

    Four requests each way keep a disk as busy, with fewer threads beside the update: see `refimpl bench disk`.
    """

    block_size: int = 1 << 20  # bytes of one request, rounded up to pages
    queue_depth: int = 4  # requests under way at once, for each of
    intra_op_parallelism: int = 1  # so many threads' worth

    def __post_init__(self) -> None:
        for name in ("block_size", "queue_depth", "intra_op_parallelism"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"aio.{name} = {getattr(self, name)}: must be a whole number, at least 1")


class Buffer:
    """Page-aligned memory of this process alone. `bytes` [nbytes, rounded up to pages] is a tensor on it.

    In huge pages where the kernel has them: 4 KB pages lie anywhere, and a disk takes only so many pieces a request.
    """

    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, pages(max(nbytes, 1)), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(AttributeError, OSError):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(self._map)
        self.bytes: Tensor = torch.frombuffer(self._map, dtype=torch.uint8)


@dataclass(frozen=True)
class Record:
    """Whole pages of the file."""

    offset: int
    nbytes: int


Look = Callable[[], None]


class Transfer:
    """Blocks on their way, each with how to look at it once it has arrived."""

    def __init__(self, blocks: Sequence[tuple["Future[None]", Look]]) -> None:
        self.blocks = blocks

    def wait(self) -> None:
        """Return when all have arrived; raises what went wrong with one, once, when none is under way any more."""
        blocks = self.taken()
        try:
            for moved, look in blocks:
                moved.result()
                look()
        finally:
            wait([moved for moved, _ in blocks])

    def taken(self) -> Sequence[tuple["Future[None]", Look]]:
        """The blocks, for who waits for them in its place."""
        blocks, self.blocks = self.blocks, ()
        return blocks


class BlockFile:
    """One rank's file in `folder`. `read_bytes`, `written_bytes`: moved so far, for wear and bandwidth."""

    def __init__(self, folder: Path, aio: Aio | None = None) -> None:
        """OffloadError if no file can be made in `folder`."""
        self.folder, self.aio = folder, aio or Aio()
        self.block = pages(self.aio.block_size)
        try:
            self.direct, self.descriptor = opened(folder)
        except OSError as error:
            raise OffloadError(
                f"{folder}: cannot make a file to offload to: {error.strerror}; give a folder on a disk that this "
                "process may write to (nvme_path in the JSON)"
            ) from error
        weakref.finalize(self, os.close, self.descriptor)
        threads = self.aio.queue_depth * self.aio.intra_op_parallelism
        # One queue each way: a write behind sixteen reads would leave half of the disk idle.
        self.readers = ThreadPoolExecutor(threads, thread_name_prefix="offload-read")
        self.writers = ThreadPoolExecutor(threads, thread_name_prefix="offload-write")
        self.end = self.read_bytes = self.written_bytes = 0
        self._sums: dict[int, int] = {}  # by offset of a block
        self._left, self._lock = self._state(), Lock()  # length and date when this process last changed it
        self._changing, self._touched = 0, False  # changes of its own under way; whether it found somebody else's

    @property
    def moved_bytes(self) -> int:
        """Both ways."""
        return self.read_bytes + self.written_bytes

    def record(self, nbytes: int) -> Record:
        """Room for so many bytes. OffloadError if the disk has it not."""
        size, disk = pages(nbytes), os.fstatvfs(self.descriptor)
        free = disk.f_bavail * disk.f_frsize
        try:
            if size > free:  # the kernel would fill the disk before it says so
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            with self._change():
                take_space(self.descriptor, self.end, size)
        except OSError as error:
            raise OffloadError(
                f"{self.folder}: no room for {size:,} more bytes to offload ({free:,} free, {self.end:,} taken by this "
                f"rank): {error.strerror}; free some, give another folder, or use more ranks"
            ) from error
        self.end += size
        return Record(self.end - size, size)

    def write(self, record: Record, buffer: Buffer) -> Transfer:
        """Begin to write the buffer's first `record.nbytes`, which must stay untouched until it is done."""
        self.written_bytes += record.nbytes
        moving = []
        for offset, block in self._cut(record, buffer.view):
            self._sums[offset] = total(block)
            moving.append((self.writers.submit(self._write_block, offset, block), _nothing))
        return Transfer(moving)

    def read(self, record: Record, buffer: Buffer, start: int = 0) -> Transfer:
        """Begin to fill `record.nbytes` of the buffer, from `start` on."""
        self.read_bytes += record.nbytes
        return Transfer(
            [
                (self.readers.submit(self._read_block, offset, block), partial(self._compare, offset, block))
                for offset, block in self._cut(record, buffer.view[start:])
            ]
        )

    def was_touched(self) -> bool:
        """Whether somebody else has changed it since it was trusted; to be asked when no write is under way.

        Dates stand still for some milliseconds on most systems: what is changed in the same ones is not seen.
        """
        return self._touched or self._left != self._state()

    def trust(self) -> None:
        """As it is now it is right."""
        self._left, self._touched = self._state(), False

    @contextmanager
    def _change(self) -> Iterator[None]:
        """A change of its own: the first of several looks at what it finds, the last has seen what all have left."""
        with self._lock:
            self._touched |= not self._changing and self._left != self._state()
            self._changing += 1
        try:
            yield
        finally:
            with self._lock:
                self._changing -= 1
                self._left = self._state()

    def _state(self) -> tuple[int, int]:
        state = os.fstat(self.descriptor)
        return state.st_size, state.st_mtime_ns

    def forget(self) -> None:
        """Read any block as it is, until it is written anew: all of it is about to be replaced.

        OSError if the file was cut, and the disk has no room for what was there.
        """
        self._sums.clear()
        if self._state()[0] < self.end:
            take_space(self.descriptor, 0, self.end)
        self.trust()

    def _cut(self, record: Record, memory: memoryview) -> Iterator[tuple[int, memoryview]]:
        for at in range(0, record.nbytes, self.block):
            yield record.offset + at, memory[at : min(at + self.block, record.nbytes)]

    def _write_block(self, offset: int, block: memoryview) -> None:
        try:
            with self._change():
                done = os.pwritev(self.descriptor, [block], offset)
        except OSError as error:
            raise OffloadError(f"{self.folder}: cannot write: {error.strerror}; {REMEDY}") from error
        if done != len(block):
            raise OffloadError(f"{self.folder}: {done:,} of {len(block):,} bytes written: is the disk full? {REMEDY}")

    def _read_block(self, offset: int, block: memoryview) -> None:
        try:
            done = os.preadv(self.descriptor, [block], offset)
        except OSError as error:
            raise OffloadError(f"{self.folder}: cannot read: {error.strerror}; {REMEDY}") from error
        if done != len(block):
            raise self._wrong(offset, block)

    def _compare(self, offset: int, block: memoryview) -> None:
        known = self._sums.get(offset)
        if known is not None and total(block) != known:
            raise self._wrong(offset, block)

    def _wrong(self, offset: int, block: memoryview) -> OffloadError:
        return OffloadError(
            f"{self.folder}: bytes {offset:,} to {offset + len(block):,} of the offloaded state are not what was "
            f"written there: the disk or its cable is failing; {REMEDY}"
        )


def opened(folder: Path) -> tuple[bool, int]:
    """(whether past the page cache, descriptor) of a new file without a name."""
    direct: int = getattr(os, "O_DIRECT", 0)
    try:
        return bool(direct), nameless(folder, direct)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP) or not direct:
            raise
    descriptor = nameless(folder, 0)
    warnings.warn(
        f"{folder}: its file system has no O_DIRECT: what is offloaded passes the page cache, and may stay there",
        OffloadWarning,
        stacklevel=4,
    )
    return False, descriptor


def nameless(folder: Path, flags: int) -> int:
    """The descriptor of a new file that is in no directory."""
    if hasattr(os, "O_TMPFILE"):
        try:
            return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):  # network disks have none: a name, for a moment
                raise
    with tempfile.NamedTemporaryFile(dir=folder) as named:
        return os.open(named.name, os.O_RDWR | flags)


def take_space(descriptor: int, start: int, nbytes: int) -> None:
    """Make the file so long; on Linux the disk's space is taken too. OSError if there is none.

    Where the file system cannot (ext3, NFS before 4.2) zeros are written: C would write single bytes, which O_DIRECT
    refuses.
    """
    if not hasattr(os, "posix_fallocate"):
        return os.ftruncate(descriptor, start + nbytes)
    try:
        os.posix_fallocate(descriptor, start, nbytes)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        zeros = Buffer(1 << 20).view
        for at in range(0, nbytes, len(zeros)):
            os.pwrite(descriptor, zeros[: nbytes - at], start + at)


def total(block: memoryview) -> int:
    """The sum of 64-bit words, modulo 2^64: at the speed of memory. Finds what is altered or missing, not swapped.

    By numpy: torch would start a team of threads for each block.
    """
    import numpy as np  # the stages need torch alone until something rests on a disk

    return int(np.frombuffer(block, dtype=np.uint64).sum())


def _nothing() -> None:
    """There is nothing to look at."""


def pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE
