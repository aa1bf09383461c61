"""Where each rank of a world stands, asked from outside: a thread of the rank's answers, even inside a collective.

It takes Python's lock to read the stacks: who reads those of threads that run, as faulthandler does in a signal's
handler, reads frames that are half made, and may end the rank (CPython 3.11: within some hundred signals). A signal is
for the last question alone, before the ranks are ended anyway, and for a rank whose C++ code keeps the lock.
A rank that waits in a GPU's collective looks as if it computed; its flight recorder knows better (see `flight.py`).
"""

import os
import signal
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from refimpl.ranks import flight, hang
from refimpl.ranks.errors import RankTimeout
from refimpl.ranks.rank import FLIGHT, STACKS, Rank, Setup
from refimpl.ranks.silence import awake

STILL = 0.25  # seconds a second that hanging ranks may be awake, in all: they look up, and machines are busy
LEFT_ALONE = "ranks wait in a collective that the others, which have finished, never enter"
STUCK = "every rank waits in a collective, and in no one that all have entered"


def stand(
    setup: Setup, processes: Sequence[Rank], lives: Sequence[Connection], pending: Collection[int], last: bool
) -> dict[int, str]:
    """What each rank does: "waits in recv at train.py:12: ...", "computes at ...", or "finished" if not `pending`.

    `last`: the ranks are ended behind it.
    """
    files = {rank: setup.stack_file(rank) for rank in pending}
    begins = {rank: file.stat().st_size if file.exists() else 0 for rank, file in files.items()}
    _ask(lives, pending, STACKS)
    stacks = _answers(files, begins, hang.is_complete)
    if last and (silent := [rank for rank in pending if not hang.is_complete(stacks[rank])]):
        for rank in silent:
            if pid := processes[rank].pid:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR1)
        stacks |= _answers({rank: files[rank] for rank in silent}, begins, hang.is_complete)
    does = {rank: hang.where(stack) for rank, stack in stacks.items()}
    asked = [rank for rank in pending if not does[rank].startswith("waits")]
    _ask(lives, asked, FLIGHT)
    records = _answers({rank: setup.flight_file(rank) for rank in asked}, {}, bool)
    more = {rank: flight.unfinished(record) for rank, record in records.items() if record}
    return {rank: does.get(rank, "finished") + more.get(rank, "") for rank in range(setup.ranks)}


def lines(does: dict[int, str]) -> str:
    """A line a rank."""
    return "\n".join(f"  rank {rank} {what}" for rank, what in does.items())


def _ask(lives: Sequence[Connection], ranks: Collection[int], what: bytes) -> None:
    for rank in ranks:
        with suppress(ConnectionError):
            lives[rank].send_bytes(what)


def _answers(files: dict[int, Path], begins: dict[int, int], is_complete: Callable[[str], bool]) -> dict[int, str]:
    """What each rank writes to its file, behind what stood there before, of as many as answer within 2 seconds."""
    texts, give_up = dict.fromkeys(files, ""), time.monotonic() + 2
    while not all(map(is_complete, texts.values())) and time.monotonic() < give_up:
        time.sleep(0.01)
        read = {rank: file.read_text() if file.exists() else "" for rank, file in files.items()}
        texts = {rank: text[begins.get(rank, 0) :] for rank, text in read.items()}
    return texts


class Lonely:
    """Finds ranks that all wait in collectives which the others, who have returned or wait elsewhere, never enter.

    They are asked twice, `alone` seconds apart once one has returned, else `together` and only while all are still: a
    rank that is about to get its last message stands elsewhere by then, and while a long one is on its way, or a loop
    makes the same call again and again, some thread moves its bytes.
    """

    def __init__(self, ranks: Sequence[Rank], alone: float, together: float) -> None:
        self.ranks, self.alone, self.together = ranks, alone, together
        self.before: dict[int, str] = {}
        self.asked = self.awake = 0.0

    def asks_at(self, heard: float, results: Collection[int]) -> float:
        """When (time.monotonic()) to look next: `heard` is when a rank was heard last, `results` who has returned."""
        return max(heard, self.asked) + (self.alone if results else self.together)

    def refuse(self, results: Collection[int], ask: Callable[[], dict[int, str]]) -> None:
        """RankTimeout if all who have not finished wait where they did when asked last, and nobody moved since."""
        still = awake(self.ranks) - self.awake < STILL * (time.monotonic() - self.asked)
        does = ask() if results or still else {}
        waits = [what.startswith("waits") for what in does.values() if what != "finished"]
        if waits and all(waits) and does == self.before and still:
            raise RankTimeout(f"{LEFT_ALONE if results else STUCK}\n{lines(does)}")
        self.before, self.asked, self.awake = does, time.monotonic(), awake(self.ranks)
