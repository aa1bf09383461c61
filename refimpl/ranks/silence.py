"""How long the ranks have said nothing, not counting the time that the machine had no CPU for them.

A rank that computes gives no sign of life, and on a busy machine a second of computing may take ten. Linux says how
long a thread ran, and how long it was ready to run and had to wait; a rank that is blocked, as in a hang, does neither.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path


class Silence:
    """Of `ranks` since one was heard, or since this was made; longer than `patience` seconds is too long."""

    def __init__(self, ranks: Sequence[BaseProcess], patience: float) -> None:
        self.ranks, self.patience = ranks, patience
        self.broken()

    def broken(self) -> None:
        """A rank was heard."""
        self.began, self._waited = time.monotonic(), waited(self.ranks)

    @property
    def ends(self) -> float:
        """When (time.monotonic()) patience is, as things stand."""
        return self.began + self.patience + waited(self.ranks) - self._waited


def waited(ranks: Sequence[BaseProcess]) -> float:
    """Seconds since its start that a rank was ready to run and did not: the longest of all ranks. 0 off Linux."""
    longest = 0.0
    for rank in ranks:
        with suppress(OSError):  # it has ended
            longest = max(longest, int(Path(f"/proc/{rank.pid}/schedstat").read_text().split()[1]) * 1e-9)
    return longest


def awake(ranks: Sequence[BaseProcess]) -> float:
    """Seconds that any thread of these ranks has run, or was ready to: their sum. 0 off Linux."""
    total = 0
    for rank in ranks:
        for file in Path(f"/proc/{rank.pid}/task").glob("*/schedstat"):
            with suppress(OSError):  # it has ended
                total += sum(map(int, file.read_text().split()[:2]))
    return total * 1e-9
