"""Patience: a transfer that takes long is waited for in short pieces, and between them others may be asked why.

Ranks that went different ways wait for each other for ever, inside a library that can not be told to stop. So a rank
does not sleep in there: after half a second it looks up, and again after a tenth, later after half a second at most.
Whoever knows more (the roll call of ZeRO-3) is asked then, with the number of the collective that is waited for, and
may raise. Where nobody knows (the others may be in a call of torch's own, which is not seen here) it waits on, and
after half a minute a line on stderr says for what; in a roll call, where ranks do what they never did there, after ten
seconds. A wait that ends in time costs nothing. Only transfers for which the host waits come here: NCCL's are ordered
by streams, and the host meets them where it reads a number (`Group.settle`).
"""

import ctypes
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import distributed_c10d

SHORT = 0.001  # seconds to sleep where other transfers of its own may go on
SELDOM = 0.5  # seconds to sleep at most: on a busy machine whoever looks up often keeps others from their work
BRIEF = 5e-5  # seconds to sleep at least for another thread to get Python's lock
SPIN = 0.002  # seconds of a device's to look without a pause: what is timed may be as short as a message


class Patience:
    """The collectives that this rank has begun in one group, numbered from 1, and how they are waited for."""

    def __init__(self, stall: float = 0.5, again: float = 0.1, late: float = 30, unheard: float = 10) -> None:
        """Somebody is asked after `stall` seconds, and every `again` seconds or more after that.

        The reader is told after `late` seconds, or after `unheard` in which other ranks were to say something.
        """
        self.stall, self.again, self.late, self.unheard = stall, again, late, unheard
        self.begun = 0  # collectives (of two halves: both), the same on every rank at the same point of the program
        self.ask: list[Callable[[int], None]] = []  # who may know why a collective does not end
        self.lost: RuntimeError | None = None  # why this group is of no more use: its ranks have begun different calls

    def begin(self) -> int:
        """The number of a collective that begins now."""
        self.refuse_lost()
        self.begun += 1
        return self.begun

    def part(self, why: RuntimeError) -> RuntimeError:
        """The ranks have begun different calls: from now on every call raises `why`, which is returned.

        What was begun never ends, and gloo's destructor waits for it: the process could not end. So nothing destroys
        the groups of this process any more.
        """
        if self.lost is None:
            for group in distributed_c10d._world.pg_map:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        self.lost = why
        return why

    def refuse_lost(self) -> None:
        """Raise what has parted the ranks, if something has."""
        if self.lost is not None:
            raise self.lost

    def wait(self, handle: Any, number: int | None, tell: Callable[[float], None]) -> None:
        """Return when the transfer `handle` of collective `number` is done. If it is `late`, `tell` hears so, once.

        number None: of a message between two, of which nobody who could be asked knows.
        """
        self.refuse_lost()
        asks = number is not None and self.ask
        began, seconds, told = time.monotonic(), self.stall if asks else self.late, False
        while not _is_done_within(handle, seconds):
            if number is not None:
                self._ask(number)
            waited = time.monotonic() - began
            if waited >= self.late and not told:
                tell(waited)
                told = True
            seconds = pause(waited, self.again)
        handle.wait()

    def poll(self, is_done: Callable[[], bool]) -> None:
        """Return when `is_done()`: what the device was given last, all collectives begun so far among it.

        After `SPIN` other threads (an update one step late, a save) have Python's lock between two looks, which torch's
        `query` of an event keeps; so this is late by a five-hundredth of what was waited, and by a millisecond at most.
        """
        began = time.monotonic()
        due = began + self.stall
        while not is_done():
            now = time.monotonic()
            if now > due:
                self._ask(self.begun)
                due = time.monotonic() + self.again
            if now - began > SPIN:
                time.sleep(min(max(BRIEF, 0.002 * (now - began)), SHORT))

    def hear_all(self, are_heard: Callable[[], bool], tell: Callable[[float], None]) -> None:
        """Return when what the other ranks say by other ways than a collective is there; else `tell` hears so, once."""
        began, waited, told = time.monotonic(), 0.0, False
        while not are_heard():
            if waited >= self.unheard and not told:
                tell(waited)
                told = True
            time.sleep(pause(waited, 1e-4))
            waited = time.monotonic() - began

    def _ask(self, number: int) -> None:
        for ask in list(self.ask):
            ask(number)


def pause(waited: float, shortest: float) -> float:
    """Seconds until one who has waited so long looks up again: ever more, to be late by a tenth of what was waited."""
    return min(max(shortest, 0.1 * waited), SELDOM)


def _is_done_within(handle: Any, seconds: float) -> bool:
    """Whether torch's handle is done, or has failed: waiting for it once more tells which."""
    try:
        handle.wait(timedelta(seconds=seconds))
    except RuntimeError:  # "Operation timed out!", the transfer goes on; or what made it fail
        return bool(handle.is_completed())
    return True
