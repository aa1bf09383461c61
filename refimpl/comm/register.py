"""Who of this machine's ranks is still there: when one dies, whoever waits for it leaves too, and is lost to others.

A rank of a pipeline sees only its neighbours go. So each writes its process into a file that all ranks of the machine
map, and, before it leaves because it waited in vain, that it does so:

    killed or raised     rank 0   its process has ended, and it said nothing: it is the one to name
    lost rank 0          rank 1   said that it gives up; ended
    lost rank 1          rank 2   reads both

Bytes: 16 a rank. The folder may be gone by then, with the rank that made it; what is mapped stays.
"""

import mmap
import os
import select
import struct
from pathlib import Path

import torch.distributed as dist

_ENTRY = struct.Struct("<qq")  # process (0: not of this machine), whether it has given up
_SOON = 200  # ms: a process closes its connections before it has ended


class Register:
    """Of a job of `ranks` ranks, of which this process is number `me`."""

    def __init__(self, directory: Path, ranks: int, me: int) -> None:
        self.ranks, self.me = ranks, me
        with (directory / "register").open("a+b") as shared:
            shared.truncate(ranks * _ENTRY.size)
            self.memory = mmap.mmap(shared.fileno(), ranks * _ENTRY.size)
        self._write(0)

    @classmethod
    def of_job(cls, directory: Path) -> "Register | None":
        """This rank's in the job that it has joined; None if the folder is gone: ranks have left."""
        try:
            return cls(directory, dist.get_world_size(), dist.get_rank())
        except FileNotFoundError:
            return None

    def give_up(self) -> None:
        """This rank leaves because it waited for another in vain."""
        self._write(1)

    def left(self) -> tuple[list[int], list[int]]:
        """(ranks that have ended by themselves, those that gave up waiting). Waits a moment for the first to end."""
        entries = [_ENTRY.unpack_from(self.memory, rank * _ENTRY.size) for rank in range(self.ranks)]
        gave_up = [rank for rank, (_, waited) in enumerate(entries) if waited and rank != self.me]
        there = {rank: pid for rank, (pid, waited) in enumerate(entries) if pid and not waited and rank != self.me}
        return _ended(there), gave_up

    def _write(self, waited: int) -> None:
        _ENTRY.pack_into(self.memory, self.me * _ENTRY.size, os.getpid(), waited)


def _ended(processes: dict[int, int]) -> list[int]:
    """Those of rank -> process that have ended; none where the system cannot watch processes."""
    if not hasattr(os, "pidfd_open"):
        return []
    poll, ended, watched = select.poll(), [], {}
    for rank, pid in processes.items():
        try:
            watched[os.pidfd_open(pid)] = rank
        except ProcessLookupError:
            ended.append(rank)
    for process in watched:
        poll.register(process, select.POLLIN)
    ended += [watched[process] for process, _ in poll.poll(0 if ended else _SOON)]
    for process in watched:
        os.close(process)
    return sorted(ended)
