"""The board: every rank writes down its next call where the ranks of its machine see it, and compares before it sends.

Collectives match by position only. If one rank's message is longer than the buffer that waits for it, gloo aborts the
process; if it is shorter, half of the buffer is filled and nobody is told. So each rank keeps a record of its calls in
a file that all ranks of the machine map into memory. Of two ranks that differ, the one that comes second sees both
calls: it raises, and has sent nothing. Cost: no message, some microseconds a call. Ranks of other machines are
not seen.

A record holds the last 64 calls of a rank. Each carries a checksum of itself and all before it, so that a rank that
comes later than that still notices, at its next call in sight.

Groups of the same ranks (two engines, say) share a record, and travel apart: a call of the one must not meet a call of
the other, were both of one length. What tells groups apart, alike on every rank, is their first call: its number.
"""

import struct
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType

from refimpl.ranks import folder, hang

ENTRY, KEPT = 512, 64  # bytes of a call, calls of a record
_HEAD = struct.Struct("<qII")  # number of the call (0: none), checksum, bytes of text
_NUMBER = struct.Struct("<q")


class CollectiveMismatch(RuntimeError):
    """Ranks called different collectives at the same point, or one with different sizes. The text names each call."""


@dataclass
class Call:
    """One call of one rank. `fits` must be equal on all ranks; `number` is its place in the record, 0 before that."""

    fits: str  # "all_reduce sum of 1000 float32"
    text: str  # with its tag and line
    number: int = 0
    part: bool = False  # of a collective, of which messages between the same two ranks may come before or after


@dataclass
class Refusal:
    """A call that was not made. It stays on the board, for the others to see, until this rank makes its next one."""

    error: CollectiveMismatch
    posted: Sequence[tuple["Records", int, int]]  # the checksum before, the number
    raised: bool = False

    def wait(self) -> None:
        """In place of a transfer that was not begun."""
        self.raised = True
        raise self.error


class Records:
    """The records of `members` ranks, of which this one is number `me`, in one file."""

    def __init__(self, file: Path, members: int, me: int) -> None:
        self.members, self.me = members, me
        self.memory = folder.mapped(file, members * (KEPT + 1) * ENTRY)

    def post(self, fits: str, text: str) -> int:
        """Write down this rank's next call. Returns its number."""
        latest, checksum = self._latest(self.me)
        at = self._at(self.me, latest + 1)
        data = text.encode()[: ENTRY - _HEAD.size]
        checksum = zlib.crc32(fits.encode(), checksum)
        _NUMBER.pack_into(self.memory, at, 0)  # nobody reads it half written: its number comes last
        self.memory[at + _HEAD.size : at + _HEAD.size + len(data)] = data
        _HEAD.pack_into(self.memory, at, 0, checksum, len(data))
        _NUMBER.pack_into(self.memory, at, latest + 1)
        _HEAD.pack_into(self.memory, self._at(self.me), latest + 1, checksum, 0)
        return latest + 1

    def agrees(self, number: int) -> bool:
        """Whether no other rank is seen to make, or to have made, other calls up to this one of mine."""
        seen = [self._checksum(member, number) for member in range(self.members)]
        return all(other in (None, seen[self.me]) for other in seen)

    def retract(self, checksum: int, number: int) -> None:
        """Forget this rank's last call, which was not made: the record is again what it was before."""
        _NUMBER.pack_into(self.memory, self._at(self.me, number), 0)
        _HEAD.pack_into(self.memory, self._at(self.me), number - 1, checksum, 0)

    def checksum(self) -> int:
        """Of all calls of this rank so far."""
        return self._latest(self.me)[1]

    def says(self, member: int, number: int) -> str:
        """What a member calls there, for the reader of an error."""
        if self._checksum(member, number) is None:
            return "is already past it" if self._latest(member)[0] >= number else "has not come here yet"
        return self._text(member, number)[0]

    def group(self, member: int, number: int) -> tuple[str, str] | None:
        """The first call of the group that a member calls there: number and text. None where no group is told."""
        text = [] if self._checksum(member, number) is None else self._text(member, number)
        return (text[1], text[2]) if len(text) == 3 else None

    def _text(self, member: int, number: int) -> list[str]:
        at = self._at(member, number) + _HEAD.size
        _, _, length = _HEAD.unpack_from(self.memory, at - _HEAD.size)
        return self.memory[at : at + length].decode(errors="replace").split("\n")

    def calls(self, member: int) -> int:
        """How many a member has made."""
        return self._latest(member)[0]

    def last(self, member: int) -> str:
        """The last call of a member, for the reader of an error."""
        number = self.calls(member)
        return f"call {number}, {self.says(member, number)}" if number else "no call yet"

    def _at(self, member: int, number: int | None = None) -> int:
        """Where a call stands, or (without a number) what is known of the latest."""
        return ENTRY * (member * (KEPT + 1) + (0 if number is None else 1 + number % KEPT))

    def _latest(self, member: int) -> tuple[int, int]:
        number, checksum, _ = _HEAD.unpack_from(self.memory, self._at(member))
        return number, checksum

    def _checksum(self, member: int, number: int) -> int | None:
        """Of a member's calls up to this one; None if it is not there (yet, or any more)."""
        at = self._at(member, number)
        before, checksum, _ = _HEAD.unpack_from(self.memory, at)
        (after,) = _NUMBER.unpack_from(self.memory, at)
        return checksum if before == after == number else None


class Board:
    """The records of one group: `ranks` are its members' ranks in the job, `me` this one's number among them."""

    def __init__(self, directory: Path, group: str, ranks: Sequence[int], me: int) -> None:
        self.ranks, self.me = ranks, me
        self._name = directory / f"board{zlib.crc32(f'{group} {ranks}'.encode()):08x}"
        self._records: dict[tuple[tuple[int, ...], bool], Records | None] = {}
        self._refusal: Refusal | None = None
        self._first: Call | None = None  # that all of this group's ranks have begun

    def announce(self, calls: Sequence[tuple[tuple[int, ...], Call]]) -> Refusal | None:
        """Write down one call among each of these members (their numbers; none: all). A refusal if one differs.

        After a refusal every call is refused for the same reason, until somebody has waited for one and was told.
        """
        if self._refusal and not self._refusal.raised:
            return self._refusal
        for records, before, number in self._refusal.posted if self._refusal else ():
            records.retract(before, number)
        self._refusal = None
        posted: list[tuple[Records, int, int]] = []
        for members, call in calls:
            if there := self.records(*members, part=call.part):
                before = there.checksum()
                call.number = there.post(*(call.fits, call.text) if members else self._of_group(call))
                posted.append((there, before, call.number))
        for records, _, number in posted:
            if not records.agrees(number):
                members = next(m for (m, _), known in self._records.items() if known is records)
                self._refusal = Refusal(CollectiveMismatch(self._text(records, members, number)), posted)
                return self._refusal
        if self._first is None and calls[-1][0] == ():
            self._first = calls[-1][1]
        return None

    def _of_group(self, call: Call) -> tuple[str, str]:
        """What must fit, and the text, with this group's own mark."""
        first = self._first or Call("", "this one")
        return f"{call.fits} in group {first.number}", f"{call.text}\n{first.number}\n{first.text}"

    def records(self, *members: int, part: bool = False) -> Records | None:
        """That of the whole group, or from one member to another. None once its folder is gone: ranks have left."""
        key = members, part
        if key not in self._records:
            file = Path("-".join([str(self._name), *map(str, members), *["part"] * part]))
            place = members.index(self.me) if members else self.me
            try:
                self._records[key] = Records(file, len(members) or len(self.ranks), place)
            except FileNotFoundError:
                self._records[key] = None
        return self._records[key]

    def mine(self) -> str:
        """The last call of this rank in this group, in words."""
        records = self.records()
        return records.last(self.me) if records else "a collective"

    def behind(self) -> list[int]:
        """The members that have made fewer calls than this one."""
        records = self.records()
        return [m for m in range(len(self.ranks)) if records.calls(m) < records.calls(self.me)] if records else []

    def elsewhere(self) -> dict[int, str]:
        """The members that have gone on to a call of another group of these ranks, which this one has not made."""
        records, mine, found = self.records(), str(self._first.number if self._first else 0), dict[int, str]()
        if records is None:
            return found
        for member in range(len(self.ranks)):
            number = records.calls(member)
            group = records.group(member, number)
            if number > records.calls(self.me) and group and group[0] != mine:
                found[member] = f"{records.last(member)}, in the group of call {group[0]}, {group[1]}"
        return found

    def standings(self) -> str:
        """The last call of each rank of this group, a line each."""
        records = self.records()
        head = "\nThe last call of each rank of this group:"
        return head + "".join(f"\n  rank {r}: {records.last(i)}" for i, r in enumerate(self.ranks)) if records else ""

    def _text(self, records: Records, members: tuple[int, ...], number: int) -> str:
        ranks = [self.ranks[member] for member in members] or self.ranks
        said = {rank: records.says(member, number) for member, rank in enumerate(ranks)}
        groups = {rank: first for member, rank in enumerate(ranks) if (first := records.group(member, number))}
        head = "ranks called different collectives, or one with buffers of different lengths"
        if len({number for number, _ in groups.values()}) > 1:
            head = "ranks called collectives of different groups, as those of two engines are"
            said |= {rank: f"{said[rank]}, in the group of call {n}, {first}" for rank, (n, first) in groups.items()}
        if members:
            head = "what one rank sends is not what the other waits for"
        if len(set(said.values())) == 1:
            head = "the calls of these ranks were different before this one, too long ago to be told"
        lines = "".join(f"\n  rank {rank}: {text}" for rank, text in said.items())
        return f"{head}:{lines}\nAll ranks must make the same calls in the same order, with the same length and dtype"


def caller() -> str:
    """ " at train.py:12", the innermost line that is neither ours nor a library's; "" if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return f" at {frame.f_code.co_filename}:{frame.f_lineno}" if frame else ""


def stacklevel() -> int:
    """For `warnings.warn` in the function that asks: that line, whoever of ours is in between."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back and _is_library(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    return level


@cache
def _is_library(file: str) -> bool:
    return hang.in_stdlib(file) or file.startswith((hang.REFIMPL, hang.TORCH, "<string>"))
