"""Grades chapter 08's bytes and blocks: whole pages and their neighbours, and a disk that lies."""

import binascii
import pickle
import zlib
from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from torch import Tensor

from refimpl.grading.compare import Wrong, require
from refimpl.grading.drive import PAGE, LateDisk
from refimpl.grading.grade import on_ranks
from refimpl.grading.memory import untouched
from refimpl.grading.rank import Answer, case
from refimpl.grading.traffic import WatchedGroup

SIZE = 2 * PAGE  # of a block


def numbers(nbytes: int, seed: int = 0) -> Tensor:
    """uint8 [nbytes], of all values but 0 and 255."""
    return torch.randint(1, 255, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


RANGES = [
    (0, PAGE),
    (PAGE, 3 * PAGE),
    (4000, 5000),
    (PAGE + 100, 200),
    (PAGE - 1, 2),
    (0, 1),
    (2 * PAGE, PAGE + 1),
    (2 * PAGE + 7, PAGE - 7),
    (100, 2 * PAGE),
]


@on_ranks(1)
def test_write_bytes(answer: Answer, group: WatchedGroup) -> None:
    for start, size in RANGES:
        case(f"{size} bytes from byte {start} on")
        disk, data, old = LateDisk(), numbers(size, seed=1), numbers(8 * PAGE)
        disk.poke(0, old)
        with untouched(data=data):
            answer.write_bytes(disk, start, data)
        require(not disk.under_way, "a transfer was not waited for: at return the bytes must be on the disk")
        first, last = start // PAGE, (start + size - 1) // PAGE
        judge_bytes(disk, start, data, old)
        written = judge_transfers(disk, "write")
        require(written == [(first, last)], f"pages written: {named(written)}, expected {named([(first, last)])}, once")
        in_part = {first} if start % PAGE else set()
        in_part |= {last} if (start + size) % PAGE else set()
        read = [page for a, b in judge_transfers(disk, "read") for page in range(a, b + 1)]
        require(
            sorted(read) == sorted(in_part),
            f"pages read: {sorted(read)}, expected {sorted(in_part)}: those that the data covers in part, once",
        )


def judge_bytes(disk: LateDisk, start: int, data: Tensor, old: Tensor) -> None:
    end, now = start + len(data), disk.peek(0, 8 * PAGE)
    require(torch.equal(now[start:end], data), "the bytes are not where they were to be written")
    for side, part in (("before", slice(0, start)), ("behind", slice(end, None))):
        lost = int((now[part] != old[part]).sum())
        require(not lost, f"{lost} bytes {side} the data have changed: read the page that it covers in part first")


def judge_transfers(disk: LateDisk, kind: str) -> list[tuple[int, int]]:
    """First and last page of each transfer. Their lengths are those of the memory, which the disk has kept."""
    return [(at // PAGE, (at + size - 1) // PAGE) for what, at, size in disk.log if what == kind]


def named(pages: list[tuple[int, int]]) -> str:
    return ", ".join(f"{a} to {b}" if a < b else f"{a}" for a, b in pages) or "none"


@on_ranks(1)
def test_CheckedBlocks(answer: Answer, group: WatchedGroup) -> None:
    disk = LateDisk()
    blocks, memory = answer.CheckedBlocks(disk, SIZE), disk.buffer(SIZE)
    case("what is written is read, also when it was written twice")
    for version in (0, 1):
        for k in (3, 0, 2, 1):
            memory.copy_(numbers(SIZE, seed=10 * version + k))
            blocks.write(k, memory)
            require(not disk.under_way, "a write was not waited for")
    for k in range(4):
        error = refused(blocks, k, memory, disk)
        require(not error, f"block {k} was written twice and is as it was written last, and yet: {error}")
        require(torch.equal(memory, numbers(SIZE, seed=10 + k)), f"block {k} was read, and other bytes are in memory")
    kept = len(pickle.dumps({name: value for name, value in vars(blocks).items() if name != "disk"}))
    require(kept < 4 * 64 + 256, f"about {kept:,} bytes are kept for 4 blocks of {SIZE:,}: keep a sum, not a copy")
    good = disk.peek(0, 4 * SIZE)
    for name, changed in lies(good).items():
        case(name)
        disk.poke(0, changed)
        judge_lie(blocks, disk, memory, good, changed)
    case("one bit has changed, at one of 1000 places in block 2")
    judge_bits(blocks, disk, memory, good)
    case("block 2 is another one, of the same 16-bit sum")
    judge_short_sums(blocks, disk, memory)
    case("the disk says that it wrote block 1, and did not")
    disk.poke = lambda offset, values: None  # type: ignore[method-assign]
    blocks.write(1, memory.copy_(numbers(SIZE, seed=21)))
    del disk.poke
    lost = "block 1 was not written, and nobody noticed: take the sum of what should be written, before"
    require(refused(blocks, 1, memory, disk), lost)
    blocks.write(1, memory.copy_(good[SIZE : 2 * SIZE]))
    case("a block that nobody wrote")
    disk.poke(0, good)
    require(refused(blocks, 4, memory, disk), "block 4 was never written, and yet it is read without an error")
    case("two disks")
    other = LateDisk()
    other.poke(0, good)
    error = refused(answer.CheckedBlocks(other, SIZE), 1, other.buffer(SIZE), other)
    require(error, "a second CheckedBlocks knows sums of the first one's disk: keep them in the object")


def judge_bits(blocks: Any, disk: LateDisk, memory: Tensor, good: Tensor) -> None:
    """A sum of few bits, or of a part of the block, misses some."""
    missed = 0
    for at in torch.randint(2 * SIZE, 3 * SIZE, (1000,), generator=torch.Generator().manual_seed(5)).tolist():
        disk.poke(at, good[at : at + 1] ^ (1 << at % 8))
        missed += not refused(blocks, 2, memory, disk)
        disk.poke(at, good[at : at + 1])
    require(not missed, f"{missed} of 1000 changed bits go unnoticed: the sum must depend on every byte, and be long")


SHORT: dict[str, Callable[[bytes], int]] = {
    "zlib.crc32's low half": lambda data: zlib.crc32(data) & 0xFFFF,
    "zlib.crc32's high half": lambda data: zlib.crc32(data) >> 16,
    "binascii.crc_hqx": lambda data: binascii.crc_hqx(data, 0),
}


def judge_short_sums(blocks: Any, disk: LateDisk, memory: Tensor) -> None:
    """Among some hundred blocks two have one sum, if it has 16 bits: one is written, the disk gives the other."""
    for name, short in SHORT.items():
        seen: dict[int, int] = {}
        for seed in count(100):
            first = seen.setdefault(short(numbers(SIZE, seed).numpy().tobytes()), seed)
            if first != seed:
                break
        blocks.write(2, memory.copy_(numbers(SIZE, first)))
        disk.poke(2 * SIZE, numbers(SIZE, seed))
        few = f"another block of the same 16 bits ({name}) goes unnoticed: one in 65,536 has them; keep all 32"
        require(refused(blocks, 2, memory, disk), few)


def lies(good: Tensor) -> dict[str, Tensor]:
    """What a disk may hold in place of four blocks."""
    found = {}
    for name, at in {"first": 2 * SIZE, "last": 3 * SIZE - 1}.items():
        found[f"one bit of the {name} byte of block 2 has changed"] = good.clone()
        found[f"one bit of the {name} byte of block 2 has changed"][at] ^= 1
    swapped, words, pages, old, zeros = (good.clone() for _ in range(5))
    pages[:PAGE], pages[PAGE : 2 * PAGE] = good[PAGE : 2 * PAGE], good[:PAGE]
    swapped[:SIZE], swapped[SIZE : 2 * SIZE] = good[SIZE : 2 * SIZE], good[:SIZE]
    words[8:16], words[16:24] = good[16:24], good[8:16]
    old[3 * SIZE :] = numbers(SIZE, seed=3)
    zeros[SIZE : 2 * SIZE] = 0
    return found | {
        "blocks 0 and 1 have changed places": swapped,
        "two words of block 0 have changed places": words,
        "the two pages of block 0 have changed places": pages,
        "block 3 is as it was before its last write: the disk lost that": old,
        "block 1 is all zeros": zeros,
    }


def judge_lie(blocks: Any, disk: LateDisk, memory: Tensor, good: Tensor, changed: Tensor) -> None:
    for k in range(4):
        part = slice(k * SIZE, (k + 1) * SIZE)
        wrong, error = not torch.equal(good[part], changed[part]), refused(blocks, k, memory, disk)
        require(error or not wrong, f"block {k} is not what was written, and nobody noticed")
        require(not error or wrong, f"block {k} is as it was written, and yet: {error}")
        require(str(k) in error or not wrong, f"the error must name block {k}; it says: {error}")


def refused(blocks: Any, k: int, memory: Tensor, disk: LateDisk) -> str:
    """What the error says, if there is one."""
    try:
        blocks.read(k, memory.zero_())
    except OSError as error:
        return str(error) or "an error without a word"
    except (LookupError, ValueError, RuntimeError, AssertionError) as error:
        name = type(error).__name__
        raise Wrong(f"reading block {k} is a {name}, not an OSError that says what is wrong", f"  {error}") from error
    finally:
        require(not disk.under_way, "a read was not waited for")
    return ""
