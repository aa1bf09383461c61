"""A collective under way: steps, each of which starts transfers and is followed by the next when they have arrived.

A transport writes a collective as a generator that reads from top to bottom:

    yield lambda: exchange(...)     # start these transfers; what follows runs once they are here
    ordered_reduce(...)
    yield lambda: all_gather(...)

`Work` drives it. Nobody waits where a rank could compute: the caller decides when the next step is due.
"""

from collections.abc import Callable, Iterator
from typing import Any

Phase = Callable[[], list[Any]]  # starts transfers, returns their handles, which have a `wait()`
Steps = Iterator[Phase]


class Work:
    """One collective under way. A `Work` without steps is done."""

    def __init__(self, steps: Steps | None = None) -> None:
        """Starts the first step's transfers."""
        self._steps: Steps = iter(()) if steps is None else steps
        self._handles: list[Any] = []
        self.is_done, self.begun = False, 0  # begun: steps so far
        self.advance()

    def advance(self) -> None:
        """Wait for the transfers under way, then start the next step. Nothing once the work is done."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.wait()
        if (phase := next(self._steps, None)) is not None:
            self.begun += 1
            self._handles = phase()
        else:
            self.is_done = True

    def wait(self) -> None:
        """Return when the result may be used (on NCCL: when the current stream is ordered after it)."""
        while not self.is_done:
            self.advance()
