"""A collective under way: steps, each of which starts transfers and is followed by the next when they have arrived.

A transport writes a collective as a generator that reads from top to bottom:

    yield lambda: exchange(...)     # start these transfers; what follows runs once they are here
    ordered_reduce(...)
    yield lambda: all_gather(...)

`Work` drives it. Nobody waits where a rank could compute: the caller decides when the next step is due. A step that
gives the host nothing to wait for (NCCL's, which its stream orders) is followed by the next at once.

With a `Lane` all of it, the adds between two transfers too, runs on the communication's own stream:

    begun    the lane waits for the caller's stream, the first step starts
    done     the last step was queued: the lane records an event
    waited   the caller's stream waits for that event; the host does not

An exception may come before anybody has waited. What the work holds goes back to the caller's stream then, which waits.
"""

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from refimpl.comm import mode
from refimpl.comm.streams import Event, Lane

Phase = Callable[[], list[Any]]  # starts transfers, returns what the host must wait for: handles with a `wait()`
Steps = Iterator[Phase]


class Work:
    """One collective under way. A `Work` without steps is done."""

    def __init__(
        self,
        steps: Steps | None = None,
        lane: Lane | None = None,
        holds: tuple[Tensor, ...] = (),
        waited: Callable[["Work"], None] | None = None,
        timed: bool = False,
    ) -> None:
        """Starts the first step's transfers.

        `holds`: what the steps read and write, kept alive until somebody has waited (see `streams`). `waited` is called
        when the result may be used for the first time. `timed`: `begun_at` and `done_at` can be compared.
        """
        self._steps: Steps = iter(()) if steps is None else steps
        self._handles: list[Any] = []
        self.lane, self.timed, self._holds, self._waited = lane, timed, holds, waited
        self.begun_at: Event = None
        self.done_at: Event = None
        self.is_done = False
        self.inference = any(tensor.is_inference() for tensor in holds)  # which outside its mode nobody may fill
        self.held: list[tuple[int, int]] = []  # from when to when, in ns, its caller stood still for it
        if lane is None:
            self._next()
        else:
            with lane.following():
                self.begun_at = lane.streams.record(timed=True) if timed else None
                self._next()

    def __del__(self) -> None:
        if self._holds and self.lane is not None and not sys.is_finalizing():  # nobody has waited
            caller = self.lane.streams.current()
            with self.lane.use():
                self.lane.streams.followed_by(caller)

    def leave(self) -> None:
        """It will never end: nobody waits for it, whose memory must be somebody's for good."""
        self._holds = ()

    def advance(self) -> None:
        """Wait for the transfers under way, then start the next step. Nothing once the work is done."""
        if self.is_done:
            return
        since = time.perf_counter_ns()
        if self.lane is None:
            self._next()
        else:
            with self.lane.use():
                self._next()
        self.held.append((since, time.perf_counter_ns()))

    def _next(self) -> None:
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.wait()
        with mode.inference(self.inference):  # buffers are kept for a call in another mode
            for phase in self._steps:
                self._handles = phase()
                if self._handles:
                    return
        self.is_done = True
        if self.lane is not None:
            self.done_at = self.lane.streams.record(self.timed)

    def span(self) -> tuple[Event, Event] | tuple[()]:
        """When it began and was done on its stream, if it is `timed`."""
        return (self.begun_at, self.done_at) if self.timed else ()

    def wait(self) -> None:
        """Return when the result may be used: on a GPU, when the current stream is ordered after it."""
        while not self.is_done:
            self.advance()
        if self.lane is not None:
            self.lane.streams.wait(self.done_at)
        waited, self._waited, self._holds = self._waited, None, ()
        if waited is not None:
            waited(self)
