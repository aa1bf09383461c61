"""Rounds: each rank puts down where its peers can read, each peer reads there, and says that it has.

    number of a round    every rank counts the rounds of a channel for itself: all take part in all, in the same order
    2n + 1               posted: the places of round n stand in my slot, what lies there is complete
    2n + 2               finished: I shall read nothing more of round n

A rank writes only to its own words and reads its peers'. A slot serves every 16th round, once all have finished the one
before. Who must wait looks a few times, then sleeps in the kernel until the word changes (futex: man 2 futex). The word
is written after the data: x86 keeps stores in order; on ARM the GIL, which every torch and system call lets go and
takes again, is a barrier between them.
"""

import ctypes
import errno
import os
import platform
import select
import weakref
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from refimpl.comm.mapped import Mapped, Place

SLOTS = 16  # rounds of a channel that can be under way
LOOKS = 100  # before a rank sleeps; it lets others run in between
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_WAIT, _WAKE, _ALL = 0, 1, 1 << 30


class Need(NamedTuple):
    """The word of a member that must have come to a value."""

    member: int
    word: int
    value: int


class Channel:
    """Rounds among `members`, whose slots begin at these words of theirs. `files`: every rank's, by number."""

    def __init__(self, me: int, files: Sequence[Mapped], begins: dict[int, int]) -> None:
        self.me, self.files, self.begins = me, files, begins
        self.others = sorted(set(begins) - {me}, key=lambda m: (m - me) % len(files))  # each rank begins elsewhere
        self._width = slot_words(len(files))
        self._rounds = 0

    def number(self) -> int:
        """Of the next round."""
        self._rounds += 1
        return self._rounds - 1

    def post(self, number: int, places: dict[int, Place]) -> Iterator[Need]:
        """Say where each member finds what it shall read, once all are through with what stood in this slot: I too."""
        if number >= SLOTS:
            yield from self._until((*self.others, self.me), number - SLOTS, 2)
        words, at = self.files[self.me].words, self._slot(self.me, number)
        for member, (offset, size) in places.items():
            words[at + 1 + 2 * member], words[at + 2 + 2 * member] = offset, size
        self._set(at, 2 * number + 1)

    def finish(self, number: int) -> None:
        """I shall read nothing more of this round."""
        self._set(self._slot(self.me, number), 2 * number + 2)

    def posted(self, number: int, *members: int) -> Iterator[Need]:
        """What to wait for, one after the other, until these members (all others) have posted."""
        return self._until(members or self.others, number, 1)

    def finished(self, number: int) -> Iterator[Need]:
        """What to wait for, one after the other, until all others have finished."""
        return self._until(self.others, number, 2)

    def place(self, member: int, number: int) -> Place:
        """Where in its file a member that has posted shows me something."""
        words, at = self.files[member].words, self._slot(member, number)
        return words[at + 1 + 2 * self.me], words[at + 2 + 2 * self.me]

    def _until(self, members: Sequence[int], number: int, state: int) -> Iterator[Need]:
        """Nothing for those that have come so far already."""
        at, value = number % SLOTS * self._width, 2 * number + state
        for member in members:
            word = self.begins[member] + at
            if self.files[member].words[word] < value:
                yield Need(member, word, value)

    def _slot(self, member: int, number: int) -> int:
        return self.begins[member] + number % SLOTS * self._width

    def _set(self, word: int, value: int) -> None:
        file = self.files[self.me]
        file.words[word] = value
        _futex(file.address + 8 * word, _WAKE, _ALL)


class Watch:
    """Waits for peers' words, and sees when a peer's process has ended. `pids`: of all ranks, `names` for messages."""

    def __init__(self, files: Sequence[Mapped], pids: Sequence[int], names: Sequence[str]) -> None:
        """OSError if the system cannot watch processes."""
        self.files, self.names = files, names
        self.processes = [os.pidfd_open(pid) for pid in pids]
        for process in self.processes:
            weakref.finalize(self, os.close, process)

    def met(self, need: Need) -> bool:
        return self.files[need.member].words[need.word] >= need.value

    def wait(self, need: Need, seconds: float, looks: int = LOOKS) -> None:
        """Return when the need is met, or after a while. RuntimeError if it never will be: the peer has ended."""
        for _ in range(looks):
            if self.met(need):
                return
            os.sched_yield()
        file = self.files[need.member]
        seen = file.words[need.word]
        if seen < need.value and not _futex(file.address + 8 * need.word, _WAIT, seen & 0xFFFFFFFF, seconds):
            poll = select.poll()
            poll.register(self.processes[need.member], select.POLLIN)
            if poll.poll(0) and not self.met(need):  # it may have posted just before it ended
                raise RuntimeError(f"remote process has exited: {self.names[need.member]}")


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_libc = ctypes.CDLL(None, use_errno=True)


def _futex(address: int, operation: int, value: int, seconds: float = 0.0) -> bool:
    """Sleep while the 32-bit word at `address` is `value`, or wake who sleeps there. False: the time was over."""
    limit = ctypes.byref(_Timespec(int(seconds), int(seconds % 1 * 1e9))) if seconds else None
    result = _libc.syscall(
        ctypes.c_long(_FUTEX or 0), ctypes.c_void_p(address), ctypes.c_int(operation), ctypes.c_uint32(value), limit,
        None, ctypes.c_uint32(0),
    )  # fmt: skip
    return not (result == -1 and ctypes.get_errno() == errno.ETIMEDOUT)


def slot_words(ranks: int) -> int:
    """Words of a slot: its state, and a place for each rank."""
    return 1 + 2 * ranks


def channel_words(ranks: int) -> int:
    return SLOTS * slot_words(ranks)


def all_words(ranks: int) -> int:
    """Of a rank's file: the channel of all, and two with each peer, see `message_words`."""
    return channel_words(ranks) * (1 + 2 * ranks)


def message_words(ranks: int, peer: int, outward: bool) -> int:
    """Where in a rank's file its slots of the messages to a peer begin, or of those from it."""
    return channel_words(ranks) * (1 + 2 * peer + (not outward))


def unsupported() -> str:
    """What this system lacks for ranks to signal through memory; "" if it has all."""
    missing = [name for name in ("memfd_create", "pidfd_open") if not hasattr(os, name)]
    if _FUTEX is None:
        missing.append(f"a known futex call on {platform.machine()}")
    return f"{platform.system()} lacks {', '.join(missing)}" if missing else ""
