"""The errors that a world raises, and which of several failures to raise: the first that no other explains."""

import signal
import time
from dataclasses import dataclass

from refimpl.ranks.rank import Failure

_GRACE = 0.2  # seconds the other ranks have to finish or report after one has failed
_GRACE_LOST = 3.0  # ... after none but echoes: the rank that failed first has yet to be heard


class RankError(RuntimeError):
    """A rank failed. The text names the rank, the error and the line.

    `rank` is the rank that failed first, None if no single one did. `__cause__` is the rank's own exception, None if
    that cannot be pickled.
    """

    def __init__(self, text: str, rank: int | None = None) -> None:
        super().__init__(text)
        self.rank = rank


class RankDied(RankError):
    """A rank's process ended before its function returned: killed by a signal, or by os._exit."""


class RankTimeout(RankError):
    """No rank gave a result or a report for `timeout` seconds, or all wait in collectives that others never enter.

    The text says where each rank stands.
    """


@dataclass(frozen=True)
class Failed:
    """One rank's failure, as its caller sees it."""

    secondary: bool  # an echo: another rank failed first
    time: float  # time.monotonic()
    error: RankError
    out_of_step: bool = False  # the ranks' process group is of no more use

    def order(self) -> tuple[bool, float]:
        return self.secondary, self.time


def end_of_grace(failures: list[Failed]) -> float:
    """Until when (time.monotonic()) the ranks that have not failed may still finish or report."""
    if all(failed.secondary for failed in failures):
        return min(failed.time for failed in failures) + _GRACE_LOST
    return min(failed.time for failed in failures if not failed.secondary) + _GRACE


def failed(rank: int, value: Failure | int | None) -> Failed:
    if not isinstance(value, Failure):
        return Failed(False, time.monotonic(), RankDied(f"rank {rank} {_ending(value)}", rank))
    trace = value.trace if isinstance(value.trace, str) else "".join(value.trace.format())
    error = RankError(f"rank {rank} raised {value.title}\n\n{trace}".rstrip(), rank)
    error.__cause__ = value.error
    return Failed(value.secondary, value.time, error, value.out_of_step)


def _ending(code: int | None) -> str:
    if code is None:
        return "closed its connection to its caller"
    if code >= 0:
        return f"exited with code {code} before its function returned"
    name = signal_name(-code)
    return f"was killed by {name}" + (" (by the operating system, if memory ran out)" if name == "SIGKILL" else "")


def signal_name(number: int) -> str:
    """Most signals of real time have none."""
    return next((s.name for s in signal.Signals if s == number), f"signal {number}")
