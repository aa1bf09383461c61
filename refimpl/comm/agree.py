"""One call of a group on its way: announced on the board before each of its phases, and its failure put into words."""

import re
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from refimpl.comm.board import Board, Call, caller
from refimpl.comm.patience import Patience
from refimpl.comm.tasks import Task
from refimpl.comm.work import Phase, Steps
from refimpl.ranks.lost import RankLost, lost_connection
from refimpl.ranks.register import Register

Part = tuple[tuple[int, ...], str]  # (sender, receiver) of one message, and what it holds


class Agreed:
    """A collective whose phases begin only if no rank is seen to begin another; `text` is what an error says of it.

    `parts`: messages between two ranks, each of which must suit both, where the ranks bring different sizes.
    """

    def __init__(
        self,
        board: Board | None,
        register: Register | None,
        patience: Patience,
        rank: int,
        what: str,
        tag: str,
        parts: Sequence[Part] = (),
    ) -> None:
        self.board, self.register, self.patience, self.rank, self.what = board, register, patience, rank, what
        self.text = what + (f", tag {tag!r}" if tag else "") + caller()
        self.parts = parts
        self.number = 0  # of the first phase among the group's calls, once that has begun

    def adds(self, word: str) -> None:
        """What must be equal too, known only now."""
        self.what, self.text = self.what + word, self.text + word

    def collective(self, steps: Steps) -> Iterator[Phase]:
        """Steps in which every rank of the group takes part."""
        for phase in steps:
            yield lambda phase=phase: self._begin(phase, everyone=True)  # type: ignore[misc]

    def message(self, steps: Steps) -> Iterator[Phase]:
        """Steps that concern two ranks alone."""
        for phase in steps:
            yield lambda phase=phase: self._begin(phase, everyone=False)  # type: ignore[misc]

    def announce(self) -> None:
        """Write the call down, where its transfer is torch's own. CollectiveMismatch if another rank makes another.

        Once a rank has told the others that it cannot go on, their calls have parted: no more is compared.
        """
        if not self.board or self.patience.lost is not None:
            return
        if refusal := self.board.announce([((), Call(self.what, self.text))]):
            refusal.wait()

    def _begin(self, phase: Phase, everyone: bool) -> list[Any]:
        place = self.patience.begin() if everyone else None
        if self.board:
            of = self.board.ranks
            calls = [
                (m, Call(what, f"{self.text}, {what} from {of[m[0]]} to {of[m[1]]}", part=True))
                if everyone
                else (m, Call(what, self.text))
                for m, what in self.parts
            ]
            if everyone:
                half = f"second half of call {self.number}: " if self.number else ""
                calls.append(((), Call(half + self.what, half + self.text)))
            if refusal := self.board.announce(calls):
                return [refusal]
            self.number, self.parts = calls[-1][1].number, ()
        with self:
            return [Transfer(handle, self, place) for handle in phase()]

    def is_late(self, waited: float, needs: str = "every rank") -> None:
        """Say so, to the reader of a job that seems to hang."""
        did = self.board.standings() if self.board else ""
        print(
            f"rank {self.rank} has waited {waited:.0f} s for other ranks in {self.text}. Are they slow, or did they go "
            f"another way? It needs {needs}.{did}",
            file=sys.stderr,
            flush=True,
        )

    def __enter__(self) -> "Agreed":
        """Errors inside that only say that a connection closed become RankLost."""
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, RuntimeError) and lost_connection(error) and not isinstance(error, RankLost):
            reason = re.sub(r"^\[[^]]*\] ", "", str(error).strip().splitlines()[-1]).rstrip(".")  # not gloo's own file
            did = self.board.standings() if self.board else ""
            raise RankLost(
                f"rank {self.rank} waits in vain in {self.text}: {who_left(self.register)}. The library says: {reason}."
                + did
            ) from None


def who_left(register: Register | None) -> str:
    """In words; this rank is about to leave too, and says so to those that wait for it."""
    left, waited = register.left() if register else ([], [])
    if register:
        register.give_up()
    did = "(it returned, raised or was killed)"
    if not left:
        return f"another rank left {did} or is stuck. Look at what the others printed last"
    text = f"{_ranks(left)} left {did}. Look at the last output there"
    return text + (f"; {_ranks(waited)} waited in vain before this one" if waited else "")


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


class Transfer:
    """A transfer under way, part of a collective, of which it is the `place`th of its group (None: of a message)."""

    def __init__(self, handle: Any, part_of: Agreed, place: int | None) -> None:
        self.handle, self.part_of, self.place = handle, part_of, place

    def wait(self) -> None:
        with self.part_of:
            patience, tell = self.part_of.patience, self.part_of.is_late
            if self.place is not None:
                patience.wait(self.handle, self.place, tell)
            elif isinstance(self.handle, Task):
                patience.wait(self.handle, None, partial(tell, needs="both ranks"))
            else:  # torch's message is lost once a wait for it was too short
                self.handle.wait()
