"""The roll call: a rank that leaves the path all ranks were on says so before it does anything, and hears the others.

Collectives match by position only. A rank that skips a module pairs its next gather with another rank's gather of
something else: with equal sizes the weights are silently wrong, with different ones the job dies or hangs, and nothing
names the module (DeepSpeed issues 7998, 5828). What a rank does next is nearly always what it did there before (see
`Path`), so nothing is said while that holds. Of the ranks at a fork at least one does something else, and calls:

    a rank    and then                                                          says            becomes
    follows   does what was expected                                            nothing         follows
    follows   is about to do something else                                     what it is      calling
    follows   has waited 0.5 s for a collective that a calling rank has not begun   where it is     calling
    calling   has heard all ranks: they are about to do the same                nothing         follows
    calling   has heard all ranks: they are not                                 RankDivergence  -
    follows   cannot do it: its disk has lost what it needs                     what failed     calling
    calling   has heard all ranks: one cannot                                   OffloadError    -
    calling   sees a rank call the roll of another model, where it has not said RankDivergence  -
    calling   sees a rank in a call of another engine, which it has not made    RankDivergence  -

A calling rank begins nothing, so whoever waits for it learns why; who waits for a rank that is merely slow finds nobody
calling, and waits on. What is said stands in the key-value store in which the ranks met, a value a rank, written over
at every second call: no collective is needed, nothing travels while nobody calls, and none of it goes through a GPU.
"""

import json
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from refimpl.checkpoint.errors import by_rank
from refimpl.comm.agree import who_left
from refimpl.comm.board import caller
from refimpl.comm.group import Group
from refimpl.offload.blocks import OffloadError
from refimpl.ranks.lost import RankLost
from refimpl.ranks.register import Register

OUT_OF_STEP = (
    "Nothing was updated since the last step; but the ranks have begun different calls, and are of no more use: start "
    "them again"
)


class RankDivergence(RuntimeError):
    """Ranks take different paths through the model. The text names what each of them does where they part.

    `out_of_step`: some have begun collectives that others never will, so the process group is of no more use.
    """

    def __init__(self, text: str, out_of_step: bool = False) -> None:
        super().__init__(text)
        self.out_of_step = out_of_step

    def __reduce__(self) -> Any:
        return RankDivergence, (str(self), self.out_of_step)


@dataclass(frozen=True)
class Standing:
    """Where a rank is when it calls: `at` things were done before, `begun` collectives."""

    at: int
    begun: int
    does: str  # what it is about to do; "" if it waits
    expected: str  # what it did here the last time, "" if it never was here
    failed: str = ""  # why it cannot do it
    waits: str = ""  # where it waits for the others: ", in or after call 7, all_gather at train.py:12"


def stuck(number: int, said: Sequence[Standing | None]) -> bool:
    """Whether a calling rank keeps collective `number` from being done: it will not begin it before all have called."""
    return any(standing is not None and standing.begun < number for standing in said)


def silent(said: Sequence[Standing | None]) -> list[int]:
    """The ranks that have said nothing."""
    return [rank for rank, standing in enumerate(said) if standing is None]


def parted(said: Sequence[Standing]) -> list[str] | None:
    """What each rank does where they part; None if all are about to do the same.

    Who is further on has passed there without a word, so it did what was expected.
    """
    first = min(said, key=lambda standing: (standing.at, not standing.does))
    if all((standing.at, standing.does) == (first.at, first.does) for standing in said):
        return None
    usual = first.expected or "something else"
    return [(s.does or f"waits for the others{s.waits}") if s.at == first.at else usual for s in said]


class RollCall:
    """What the ranks of a group have to say to each other; one for each stage."""

    def __init__(self, group: Group) -> None:
        self.patience, self.rank, self.size, self.round = group.patience, group.rank, group.size, 0
        self.behind, self.calls, self.last_calls = group.behind, group.elsewhere, group.last_calls
        self.ranks, self.register = group.ranks, Register.of_job()
        assert group.handle is not None
        everyone = f"{group.handle.group_name} {dist.get_process_group_ranks(group.handle)}"
        self.all = PrefixStore(f"roll call of {everyone}", _get_default_store())  # of the stages of these ranks
        self.number = self.all.add(f"stages of {self.rank}", 1)  # ranks build their stages in the same order
        self.store = self._of_stage(self.number)
        self.leave = weakref.finalize(self, _leave, self.store, self.rank)  # also when the process ends

    def __call__(self, mine: Standing) -> None:
        """Say where this rank is; return when every rank is about to do the same.

        RankDivergence if one is not, OffloadError if one cannot, RankLost if one is no longer there.
        """
        self.patience.refuse_lost()
        try:
            self._go(mine)
            self.store.set(self._key(self.rank), json.dumps({"round": self.round, **asdict(mine)}))
            self.patience.hear_all(self._all_have_said, lambda waited: self._is_late(mine, waited))
            standings = [standing for standing in self.said() if standing is not None]
        except dist.DistNetworkError as gone:  # the store has gone, with the rank that kept it
            raise self._lost() from gone
        self.round += 1
        if any(standing.failed for standing in standings):
            failed = by_rank({rank: s.failed or None for rank, s in zip(self.ranks, standings, strict=True)})
            raise self.patience.part(OffloadError(f"{failed}. {OUT_OF_STEP}"))
        if (doing := parted(standings)) is not None:
            ranks = "; ".join(f"rank {rank}: {what}" for rank, what in zip(self.ranks, doing, strict=True))
            error = RankDivergence(
                f"the ranks take different paths through the model. {ranks}. ZeRO-3 needs every rank to run the same "
                "modules in the same order: make the branch depend on something that is equal on all ranks, or, where "
                "tokens choose their experts, or gradients of a module come in another order, have the module around "
                "these gathered whole: ZeroConfig.leaf_modules, deepspeed.utils.set_z3_leaf_modules",
                out_of_step=len({standing.begun for standing in standings}) > 1,
            )
            if error.out_of_step:
                self.patience.part(error)
            raise error

    def said(self) -> list[Standing | None]:
        """What each rank has said in this round, so far."""
        return [self._said(rank) for rank in range(self.size)]

    def _all_have_said(self) -> bool:
        """RankLost if one never will; RankDivergence if one waits for this rank elsewhere."""
        said = self.said()
        self._expect(said)
        self._refuse_elsewhere(silent(said), lambda: silent(self.said()))
        return None not in said

    def look_elsewhere(self, mine: Standing) -> None:
        """This rank waits in a collective: RankDivergence if one that has not begun it calls another stage's roll."""
        behind = self.behind()
        if self._elsewhere(behind):
            self._go(mine)
            self._refuse_elsewhere(behind, self.behind)

    def _go(self, mine: Standing) -> None:
        """Let all see to which stage this rank has come."""
        here = {"stage": self.number, "round": self.round, "what": self._words(mine)}
        self.all.set(_place(self.rank), json.dumps(here))

    def _words(self, mine: Standing) -> str:
        what = (mine.does + caller()) if mine.does else f"waits for the others{mine.waits}"
        return f"{what} (model {self.number} under ZeRO-3)"

    def _is_late(self, mine: Standing, waited: float) -> None:
        """Say so, to the reader of a job that seems to hang: those who are not here may be where nothing is seen."""
        missing = ", ".join(str(self.ranks[rank]) for rank in silent(self.said()))
        print(
            f"rank {self.ranks[self.rank]} has waited {waited:.0f} s to hear from ranks that have not come here: "
            f"{missing}. It is at: {self._words(mine)}. This needs every rank: if the others are not merely slow, call "
            f"it on all of them, not under `if rank == 0`.{self.last_calls()}",
            file=sys.stderr,
            flush=True,
        )

    def _elsewhere(self, ranks: Sequence[int]) -> dict[int, str]:
        """Those of these ranks that wait where this one has not come: another stage's roll, or another group's call."""
        places = {rank: json.loads(self.all.get(_place(rank))) for rank in ranks if self.all.check([_place(rank)])}
        others = {rank: place for rank, place in places.items() if place["stage"] != self.number}
        rolls = {rank: p["what"] for rank, p in others.items() if not self._has_come(p["stage"], p["round"])}
        return {rank: what for rank, what in self.calls().items() if rank in ranks} | rolls

    def _has_come(self, stage: int, round_: int) -> bool:
        """Whether this rank has said something there."""
        store, key = self._of_stage(stage), _key(self.rank, round_)
        return store.check([key]) and json.loads(store.get(key))["round"] >= round_

    def _refuse_elsewhere(self, ranks: Sequence[int], missing: Callable[[], Sequence[int]]) -> None:
        """`missing`: which are not here yet, asked anew: one that came since, and went on, is no stranger there."""
        there = self._elsewhere(ranks)
        still = missing() if there else ()
        if there := {rank: what for rank, what in there.items() if rank in still}:
            there[self.rank] = json.loads(self.all.get(_place(self.rank)))["what"]
            who = "; ".join(f"rank {self.ranks[rank]}: {what}" for rank, what in sorted(there.items()))
            raise self.patience.part(
                RankDivergence(
                    f"the ranks have come to different models, and wait for each other. {who}. Call the engines in the "
                    "same order on every rank",
                    out_of_step=True,
                )
            )

    def _of_stage(self, number: int) -> Store:
        return PrefixStore(f"stage {number}", self.all)

    def _said(self, rank: int) -> Standing | None:
        if not self.store.check([self._key(rank)]):
            return None
        value = json.loads(self.store.get(self._key(rank)))
        return Standing(**value) if value.pop("round") == self.round else None

    def _key(self, rank: int) -> str:
        return _key(rank, self.round)

    def _expect(self, said: Sequence[Standing | None]) -> None:
        for rank, standing in enumerate(said):
            if standing is None and self.store.check([_gone(rank)]) and self._said(rank) is None:
                left, mine = self.ranks[rank], self.ranks[self.rank]
                raise RankLost(f"rank {left} has left; rank {mine} is about to do more with ZeRO-3 than it did")
        waited_for = [self.ranks[rank] for rank in silent(said)]
        if self.register and self.register.gone(waited_for) and None in self.said():  # killed: it left no word
            raise self._lost()

    def _lost(self) -> RankLost:
        mine = self.ranks[self.rank]
        return RankLost(f"rank {mine} waits in vain to hear what the others do: {who_left(self.register)}")


def _key(rank: int, round_: int) -> str:
    """Two in turn: who has begun round n + 2 knows that all have read what it said in round n."""
    return f"{rank} {round_ % 2}"


def _place(rank: int) -> str:
    return f"{rank} has come to"


def _leave(store: Store, rank: int) -> None:
    with suppress(dist.DistError):  # the store went first: nobody is left to be told
        store.set(_gone(rank), "")


def _gone(rank: int) -> str:
    return f"{rank} is gone"
