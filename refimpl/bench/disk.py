"""A disk by itself, and what offloading gets out of it: MB/s of plain requests, and of `Disk` with its pipeline.

    read, write    requests of one size, so many threads, each with one under way, past the page cache
    both           as many threads again that write elsewhere meanwhile: what a pipeline asks of a disk. The halves of
                   the record change places each turn: what is read is what the turn before has written, as in training
    update         each thread reads a block, adds one to its words, and writes it back: what a disk gives who uses it
    Disk           parts read, touched, written back, by `Disk.rounds`: bytes both ways, checksums included

Each contestant's turn comes several times, so that all meet the disk in the same moods; the best turn counts, because a
disk has no other way to show what it can do. The reference of a ratio is the best plain row of the same direction: of
six, so `Disk` has a turn beside each of the six that update. `of_both` is the rate by that of the best row of "both",
whose bytes no core ever sees: a disk that is made of its host's memory is faster with them than with any others.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from refimpl.offload.blocks import BlockFile, Buffer, Record
from refimpl.offload.homes import Disk

HEAT = ("folder", "MB")
BLOCKS = (1 << 18, 1 << 20, 1 << 22)
DEPTHS = (1, 8)
PART = 1 << 22  # bytes of a part
DIRECTIONS = ("read", "write", "both", "update")
MB = 10**6


@dataclass(frozen=True)
class Row:
    """`MB_per_s` both ways together. `ratio`: to the best plain row of this direction."""

    who: str
    direction: str
    folder: str
    MB: int
    block_KB: int
    in_flight: int
    MB_per_s: float
    ratio: float
    of_both: float | None


def plain(file: BlockFile, record: Record, block: int, threads: int, direction: str) -> Callable[[], int]:
    """Requests of `block` bytes over the record; returns how many bytes moved. "both": one half read, one written."""
    if direction == "update":
        return update(file, record, block, threads)
    room = Buffer(2 * threads * block).view  # one, for its pages are huge then, as those of a part
    starts = list(range(record.offset, record.offset + record.nbytes, block))
    halves = [starts[: len(starts) // 2], starts[len(starts) // 2 :]]

    def worker(number: int, mine: Sequence[int], write: bool) -> None:
        move = os.pwritev if write else os.preadv
        for offset in mine:
            move(file.descriptor, [room[number * block : (number + 1) * block]], offset)

    def run() -> int:
        jobs = [(n, starts[n::threads], direction == "write") for n in range(threads)]
        if direction == "both":
            halves.reverse()
            jobs = [(n, halves[0][n::threads], False) for n in range(threads)]
            jobs += [(threads + n, halves[1][n::threads], True) for n in range(threads)]
        in_threads([partial(worker, *job) for job in jobs])
        return record.nbytes

    return run


def update(file: BlockFile, record: Record, block: int, threads: int) -> Callable[[], int]:
    """Each block read, changed and written back by one of the threads."""
    room = Buffer(threads * block).view

    def worker(number: int) -> None:
        mine = room[number * block : (number + 1) * block]
        words = np.frombuffer(mine, dtype=np.int64)
        for offset in range(record.offset + number * block, record.offset + record.nbytes, threads * block):
            os.preadv(file.descriptor, [mine], offset)
            words += 1
            os.pwritev(file.descriptor, [mine], offset)

    def run() -> int:
        in_threads([partial(worker, number) for number in range(threads)])
        return 2 * record.nbytes

    return run


def in_threads(jobs: Sequence[Callable[[], None]]) -> None:
    """All at once, a thread each."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        for job in [pool.submit(job) for job in jobs]:
            job.result()


class Run:
    """A part of the state, of nothing but bytes."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = self.most = self.room = nbytes  # nothing is read beside it
        self.record: Record | None = None
        self.beside: tuple[BlockFile, Record] | None = None

    def attach(self, buffer: Buffer) -> None:
        words = np.frombuffer(buffer.view, dtype=np.int64)  # by numpy: in this thread alone
        words += 1

    def detach(self, buffer: Buffer) -> None:
        """It is in the buffer."""


def pipeline(disk: Disk, size: int) -> Callable[[], int]:
    """Parts of PART bytes, `size` in all, there and back."""
    parts = [Run(PART) for _ in range(max(3, size // PART))]
    for part in parts:
        disk.admit(part)

    def run() -> int:
        for _ in disk.rounds(parts):
            pass
        return 2 * PART * len(parts)

    return run


def measure(folder: Path, size: int, turns: int) -> Iterator[list[Row]]:
    """One heat: every way that requests can be made, then `Disk`. `size` in bytes, rounded to whole parts."""
    size = max(3, size // PART) * PART
    file, disk = BlockFile(folder), Disk(folder)
    record, zeros = file.record(size), Buffer(1 << 20)
    for at in range(0, size, 1 << 20):
        file.write(Record(record.offset + at, 1 << 20), zeros).wait()  # a block never written is read from nowhere
    ways = {
        ("plain", direction, block, depth): plain(file, record, block, depth, direction)
        for direction in DIRECTIONS
        for block in BLOCKS
        for depth in DEPTHS
    }
    ours, offloaded = ("Disk", "update", disk.file.block, disk.file.aio.queue_depth), pipeline(disk, size)
    rates = dict.fromkeys([*ways, ours], 0.0)
    for _ in range(turns):
        for way, run in ways.items():
            for who, move in ((way, run), (ours, offloaded))[: 1 + (way[1] == "update")]:
                begun = time.perf_counter()
                rates[who] = max(rates[who], move() / (time.perf_counter() - begun) / MB)
    best = {d: max(rate for (who, way, *_), rate in rates.items() if (who, way) == ("plain", d)) for d in DIRECTIONS}
    yield [
        Row(
            who, way, str(folder), size // MB, block >> 10, depth, rate, rate / best[way],
            rate / best["both"] if way in ("both", "update") else None,
        )
        for (who, way, block, depth), rate in rates.items()
    ]  # fmt: skip
