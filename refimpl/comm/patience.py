"""Patience: a transfer that takes long is waited for in short pieces, and between them others may be asked why.

Ranks that went different ways wait for each other for ever, inside a library that can not be told to stop. So a rank
does not sleep in there: after half a second, and every tenth after that, it looks up. Whoever knows more (the roll call
of ZeRO-3) is asked then, with the number of the collective that is waited for, and may raise. A wait that ends in time
costs nothing. Only transfers for which the host waits come here: NCCL's are ordered by streams, and the host meets them
where it reads a number, see `Group.settle`.
"""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

STALL, AGAIN = 0.5, 0.1  # seconds until somebody is asked for the first time, and between two times


class Patience:
    """The collectives that this rank has begun in one group, numbered from 1, and how they are waited for."""

    def __init__(self) -> None:
        self.begun = 0  # collectives (of two halves: both), the same on every rank at the same point of the program
        self.ask: list[Callable[[int], None]] = []  # who may know why a collective does not end
        self.lost: RuntimeError | None = None  # why this group is of no more use: its ranks have begun different calls

    def begin(self) -> int:
        """The number of a collective that begins now. Raises what has parted the ranks, if something has."""
        if self.lost is not None:
            raise self.lost
        self.begun += 1
        return self.begun

    def wait(self, handle: Any, number: int) -> None:
        """Return when the transfer `handle` of collective `number` is done."""
        pause = STALL
        while self.ask or self.lost is not None:
            if self.lost is not None:
                raise self.lost
            try:
                handle.wait(timedelta(seconds=pause))
                return
            except RuntimeError:
                if handle.is_completed():  # it failed, or was done a moment after its time: the library says which
                    break
            self._ask(number)
            pause = AGAIN
        handle.wait()

    def poll(self, is_done: Callable[[], bool]) -> None:
        """Return when `is_done()`: what the device was given last, all collectives begun so far among it."""
        since = time.monotonic()
        while not is_done():
            if time.monotonic() > since + STALL:
                self._ask(self.begun)
                time.sleep(AGAIN)

    def _ask(self, number: int) -> None:
        for ask in list(self.ask):
            ask(number)
