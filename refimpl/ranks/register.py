"""Who of this machine's ranks is still there: when one dies, whoever waits for it leaves too, and is lost to others.

A rank of a pipeline sees only its neighbours go. So each writes its process into a file that all ranks of the machine
map, and how it leaves:

    killed               rank 0   its process has ended, and it said nothing
    returned or raised   rank 0   said that it leaves, before it closes its connections
    lost rank 0          rank 1   said that it waited in vain; then it left
    lost rank 1          rank 2   reads all of that, and names rank 0

Bytes: 16 a rank. The folder may be gone by then, with the rank that made it; what is mapped stays.
"""

import atexit
import os
import select
import struct
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import torch.distributed as dist

from refimpl.ranks import folder, here

HERE, WAITED, LEFT = range(3)
SOON = 500  # ms: a process that is killed closes its connections a little before it has ended
_ENTRY = struct.Struct("<qq")  # process (0: not of this machine), one of the three


class Register:
    """Of a job of `ranks` ranks, of which this process is number `me`."""

    def __init__(self, directory: Path, ranks: int, me: int) -> None:
        """FileNotFoundError if the folder is gone: ranks have left."""
        self.ranks, self.me = ranks, me
        self.memory = folder.mapped(directory / "register", ranks * _ENTRY.size)

    @classmethod
    def of_job(cls) -> "Register | None":
        """This rank's in the job that it has joined, if there is one and its folder is still there."""
        directory = here.of_job()
        if directory is None or not dist.is_initialized():
            return None
        return cls._mapped(directory, dist.get_world_size(), dist.get_rank())

    @classmethod
    @cache
    def _mapped(cls, directory: Path, ranks: int, me: int) -> "Register | None":
        """Once a job: each of its groups asks."""
        try:
            mine = cls(directory, ranks, me)
        except FileNotFoundError:
            return None
        atexit.register(mine.leave)
        return mine

    def enter(self) -> None:
        """This rank is here, whatever it said before."""
        self._write(HERE)

    def give_up(self) -> None:
        """It waited for another in vain, and leaves."""
        self._write(WAITED)

    def leave(self) -> None:
        """It leaves. A process that it has forked does not."""
        if self._entry(self.me) == (os.getpid(), HERE):
            self._write(LEFT)

    def left(self) -> tuple[list[int], list[int]]:
        """(ranks that left, or ended, by themselves; those that waited in vain). Waits a moment for the first to end.

        Where the system cannot watch processes those that were killed are not among them.
        """
        entries = {rank: self._entry(rank) for rank in range(self.ranks) if rank != self.me}
        by_state = {state: [rank for rank, (_, s) in entries.items() if s == state] for state in (HERE, WAITED, LEFT)}
        there = {rank: entries[rank][0] for rank in by_state[HERE] if entries[rank][0]}
        return sorted(by_state[LEFT] + ended(there, 0 if by_state[LEFT] else SOON)), by_state[WAITED]

    def gone(self, ranks: Iterable[int]) -> bool:
        """Whether one of these ranks has left, or its process has ended. Asked by those whom no connection tells."""
        entries = {rank: self._entry(rank) for rank in ranks if rank != self.me}
        processes = {rank: pid for rank, (pid, _) in entries.items() if pid}
        return any(state != HERE for _, state in entries.values()) or bool(ended(processes, 0))

    def _entry(self, rank: int) -> tuple[int, int]:
        pid, state = _ENTRY.unpack_from(self.memory, rank * _ENTRY.size)
        return pid, state

    def _write(self, state: int) -> None:
        _ENTRY.pack_into(self.memory, self.me * _ENTRY.size, os.getpid(), state)


def ended(processes: dict[int, int], ms: int) -> list[int]:
    """Those of rank -> process that have ended; if none has, those that do within so many milliseconds."""
    if not hasattr(os, "pidfd_open"):
        return []
    poll, found, watched = select.poll(), list[int](), dict[int, int]()
    for rank, pid in processes.items():
        try:
            watched[os.pidfd_open(pid)] = rank
        except ProcessLookupError:
            found.append(rank)
    for process in watched:
        poll.register(process, select.POLLIN)
    found += [watched[process] for process, _ in poll.poll(0 if found or not watched else ms)]
    for process in watched:
        os.close(process)
    return found
