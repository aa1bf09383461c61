"""The disk of the exercises takes whole pages, does nothing before it is waited for, and tells who was too early."""

import pytest
import torch

from refimpl.grading.compare import Wrong
from refimpl.grading.drive import EMPTY, PAGE, LateDisk


def test_what_is_written_is_there_when_it_was_waited_for() -> None:
    disk = LateDisk()
    memory = disk.buffer(PAGE + 1)
    assert memory.numel() == 2 * PAGE
    memory.fill_(3)
    way = disk.write(PAGE, memory)
    assert not disk.peek(PAGE, 1).any()
    way.wait()
    way.wait()
    assert torch.equal(disk.peek(PAGE - 1, 3), torch.tensor([0, 3, 3], dtype=torch.uint8))
    assert disk.events == [("write begins", PAGE), ("write ends", PAGE)]


def test_what_is_read_is_empty_until_it_was_waited_for() -> None:
    disk = LateDisk()
    memory = disk.buffer(PAGE).fill_(3)
    way = disk.read(0, memory)
    assert (memory == EMPTY).all()
    way.wait()
    assert not memory.any()


@pytest.mark.parametrize(
    ("offset", "start", "size", "odd"), [(1, 0, PAGE, "offset"), (0, 1, PAGE, "address"), (0, 0, 7, "length")]
)
def test_what_is_not_aligned_is_refused(offset: int, start: int, size: int, odd: str) -> None:
    disk = LateDisk()
    with pytest.raises(OSError, match=f"the {odd} is . bytes beyond a multiple of 4096"):
        disk.read(offset, disk.buffer(2 * PAGE)[start : start + size])
    assert not disk.under_way


def test_memory_that_is_used_too_early_is_told() -> None:
    disk = LateDisk()
    memory = disk.buffer(PAGE).fill_(3)
    way = disk.write(0, memory)
    with pytest.raises(Wrong, match="a read of offset 4,096 begins in memory whose write of offset 0 is still"):
        disk.read(PAGE, memory)
    memory.fill_(4)
    with pytest.raises(Wrong, match="memory changed while it was being written to offset 0"):
        way.wait()
    way = disk.read(0, memory)
    memory[5] = 1
    with pytest.raises(Wrong, match="memory was written to while bytes from offset 0 were being read into it"):
        way.wait()


def test_a_broken_disk_fails_there_and_nowhere_else() -> None:
    disk = LateDisk()
    disk.broken = PAGE
    disk.read(0, disk.buffer(PAGE)).wait()
    with pytest.raises(OSError, match="Input/output error"):
        disk.read(PAGE, disk.buffer(PAGE)).wait()
    assert not disk.under_way
    disk.fails = ("write",)
    disk.read(PAGE, disk.buffer(PAGE)).wait()
    halves = disk.buffer(2 * PAGE)
    for way in [disk.read(0, halves[:PAGE]), disk.read(0, halves[PAGE:])]:  # side by side: neither is in the other
        way.wait()
