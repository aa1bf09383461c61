"""A helper goes on with a rank's collectives while its own thread does something else, as NCCL's proxy threads do.

It makes rounds from a call on, until nothing is left under way, and leaves the rank's thread alone for 20 ms each time
that this comes by itself: on a laptop both want the same core. A round in which nothing can go on takes about 0.1 ms.
"""

import os
import threading
import time
import weakref
from contextlib import AbstractContextManager
from queue import SimpleQueue
from typing import Any, Protocol

import torch

from refimpl.comm.patience import pause

ROUND = 0.02  # seconds between two rounds at least
Lock = AbstractContextManager[Any]


class Helped(Protocol):
    """What a round needs. `lock`: held meanwhile."""

    lock: Lock

    def advance(self) -> bool:
        """Go on as far as possible without waiting. Whether something is left under way."""
        ...


class Helper:
    """Of `helped`, which has it. The thread begins with the first call, and ends with `helped`."""

    def __init__(self, helped: Helped) -> None:
        self._helped, self._lock = weakref.ref(helped), helped.lock
        self._calls = SimpleQueue[bool]()  # False: the last
        self._started = self._makes_rounds = False
        self._quitting = threading.Event()
        self.seen = 0.0  # when the rank's own thread was here (time.monotonic())

    def call(self) -> None:
        """Something is left under way. With the lock."""
        if not self._started:
            self._started = True
            weakref.finalize(self, _quit, self._calls, self._quitting, self._lock, os.getpid())
            arguments = weakref.ref(self), self._calls
            threading.Thread(target=_work, args=arguments, name="refimpl-helper", daemon=True).start()
        if not self._makes_rounds:
            self._makes_rounds = True
            self._calls.put(True)

    def go_round(self) -> float | None:
        """Seconds until the next round; None if there shall be none."""
        away = time.monotonic() - self.seen
        if away < ROUND:
            return ROUND - away
        helped = self._helped()
        with self._lock, torch.no_grad():
            self._makes_rounds = helped is not None and not self._quitting.is_set() and helped.advance()
            return pause(away, ROUND) if self._makes_rounds else None


def _work(of: "weakref.ref[Helper]", calls: "SimpleQueue[bool]") -> None:
    while calls.get():
        seconds: float | None = ROUND
        while seconds is not None:
            time.sleep(seconds)
            helper = of()
            seconds = None if helper is None else helper.go_round()
            del helper


def _quit(calls: "SimpleQueue[bool]", quitting: threading.Event, lock: Lock, process: int) -> None:
    """The helper touches nothing more: a thread that is inside torch when the interpreter ends is cut off there."""
    if os.getpid() == process:  # a forked one has no helper, and may have a lock that nobody will open
        calls.put(False)
        with lock:  # a round that it has begun is over
            quitting.set()
