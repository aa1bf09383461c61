"""Read, compute, write at once: while item k is computed with, k + 1 is read and k - 1 written.

With three buffers, one row a buffer, time to the right (r read, c compute, w write):

    r0 c0 w0 r3 c3 w3
       r1 c1 w1 r4 c4 w4
          r2 c2 w2 r5 c5 w5

A buffer is read into again when what it held is written. Two buffers cannot do all three at once, one does them in
turn. ZeRO-Infinity: arXiv:2104.07857, section 6.2 (overlap-centric design). DeepSpeed:
deepspeed/runtime/swap_tensor/pipelined_optimizer_swapper.py.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TypeVar

from refimpl.offload.blocks import OffloadError, Transfer

Item = TypeVar("Item")
Room = TypeVar("Room")


def pipelined(
    items: Iterable[Item],
    rooms: Iterable[Room],
    read: Callable[[Item, Room], Transfer],
    write: Callable[[Item, Room], Transfer],
) -> Iterator[tuple[Item, Room]]:
    """Each item in turn, with the buffer that it was read into; written back when the next one is asked for.

    When it ends, by an error too, nothing is under way.
    """
    todo, free = deque(items), deque(rooms)
    reading: deque[tuple[Item, Room, Transfer]] = deque()
    writing: deque[tuple[Room, Transfer]] = deque()
    try:
        while todo or reading:
            while todo and (free or not reading):
                if not free:
                    _landed(writing, free)
                item, room = todo.popleft(), free.popleft()
                reading.append((item, room, read(item, room)))
            item, room, way = reading.popleft()
            way.wait()
            yield item, room
            writing.append((room, write(item, room)))
            if todo and not free and len(writing) > 1:
                _landed(writing, free)  # of the item before: its buffer is for the next read
        while writing:
            _landed(writing, free)
    finally:
        for _, _, way in reading:
            settle(way)
        for _, way in writing:
            settle(way)


def _landed(writing: deque[tuple[Room, Transfer]], free: deque[Room]) -> None:
    room, way = writing[0]
    way.wait()
    writing.popleft()
    free.append(room)


def settle(way: Transfer) -> None:
    """After an error that is on its way already: only that nothing moves any more."""
    with suppress(OffloadError):
        way.wait()
