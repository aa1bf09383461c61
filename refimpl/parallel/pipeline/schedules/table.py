"""A schedule is a table: for each rank the operations it computes, in order. Nothing here runs or sends anything.

    kind   what it computes, for one stage and one micro-batch    needs                             gives
    F      forward                                                forward of the stage before       forward
    B      the whole backward                                     its own F, backward of the next   backward
    I      backward's input half: what the stage before waits for its own F, backward of the next   backward
    W      backward's weight half: nobody waits for it            its own I                         nothing

B is I and then W. A rank may hold several stages (chunks of the model). `paths` tells where they lie: path j visits
`paths[j][s]` for stage s, and micro-batch k takes path k modulo the number of paths.

A rank sends, for each micro-batch and each boundary between ranks, one stage's output in forward and as much in
backward, whatever the schedule. What schedules differ in is the bubble and the memory: how long a rank idles, and how
many forwards it has done whose backward is not over. Both are stated by the table, and `verify` holds it to them.
The words follow torch.distributed.pipelining (schedules.py: F, B, I, W). DeepSpeed: deepspeed/runtime/pipe/schedule.py.

    p ranks   m micro-batches   v chunks a rank   f, i, w seconds of F, I, W of one chunk   b = i + w
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple, Protocol

Kind = Literal["F", "B", "I", "W"]
Way = Literal["forward", "backward"]


class Cost(NamedTuple):
    """Seconds, or ticks, of one chunk's forward, its backward's two halves, and of a message from rank to rank."""

    forward: float = 1
    input: float = 1
    weight: float = 1
    message: float = 0

    def of(self, op: "Op") -> float:
        return {"F": self.forward, "I": self.input, "W": self.weight, "B": self.input + self.weight}[op.kind]


class Durations(Protocol):
    """As `Cost`, where stages may differ."""

    @property
    def message(self) -> float: ...
    def of(self, op: "Op") -> float: ...


UNIT = Cost()  # forward, input half and weight half of equal length


class Value(NamedTuple):
    """What a forward or a backward gives: activations for the next stage, or gradients for the one before."""

    way: Way
    stage: int
    micro: int


class Op(NamedTuple):
    """One computation. Two operations are never equal in one table."""

    kind: Kind
    stage: int
    micro: int

    def __str__(self) -> str:
        return f"{self.kind} of stage {self.stage}, micro-batch {self.micro}"

    @property
    def gives(self) -> Value | None:
        if self.kind == "W":
            return None
        return Value("forward" if self.kind == "F" else "backward", self.stage, self.micro)

    def needs(self, stages: int) -> list[Value]:
        """What must be on its rank before it begins."""
        if self.kind == "F":
            return [Value("forward", self.stage - 1, self.micro)] if self.stage else []
        if self.kind == "W":
            return [Value("backward", self.stage, self.micro)]
        after = [Value("backward", self.stage + 1, self.micro)] if self.stage + 1 < stages else []
        return [Value("forward", self.stage, self.micro), *after]


@dataclass(frozen=True)
class Table:
    """Orders of computation, and what they promise. Hand it to `verify.verify` before you trust it.

    orders: of each rank. paths: see above. alive: for each rank, how many (stage, micro-batch) pairs at most are
    between their F and the end of their backward. bubble: what a rank idles at most between its first operation and its
    last, in the unit of `Cost`, with messages that take no time; None where no formula is known for these sizes or
    costs.
    """

    name: str
    orders: tuple[tuple[Op, ...], ...]
    paths: tuple[tuple[int, ...], ...]
    micro_batches: int
    alive: tuple[int, ...]
    bubble: Callable[[Cost], float | None] = lambda cost: None

    @property
    def ranks(self) -> int:
        return len(self.orders)

    @property
    def stages(self) -> int:
        return len(self.paths[0])

    @cached_property
    def splits(self) -> bool:
        """Whether some backward is split into halves."""
        return any(op.kind == "W" for order in self.orders for op in order)

    def rank_of(self, stage: int, micro: int) -> int:
        return self.paths[micro % len(self.paths)][stage]

    def holds(self, rank: int) -> list[int]:
        """The stages whose layers this rank must have, in order."""
        return sorted({stage for path in self.paths for stage, where in enumerate(path) if where == rank})

    def receiver(self, value: Value) -> int | None:
        """The rank that a value is sent to; None if it is needed where it is made, or nowhere."""
        stage = value.stage + 1 if value.way == "forward" else value.stage - 1
        if not 0 <= stage < self.stages:
            return None
        here, there = self.rank_of(value.stage, value.micro), self.rank_of(stage, value.micro)
        return there if there != here else None


def take_turns(forwards: Sequence[Op], backwards: Sequence[Op], ahead: int) -> list[Op]:
    """`ahead` forwards, then one forward and one backward by turns, then the backwards that are left."""
    order = list(forwards[:ahead])
    for i, backward in enumerate(backwards):
        order += [*forwards[ahead + i : ahead + i + 1], backward]
    return order


def count_off(words: Iterable[str], stages: Sequence[int]) -> list[Op]:
    """["F0", "F0", "I1"] -> F of micro-batches 0 and 1 on the rank's chunk 0, I of micro-batch 0 on its chunk 1.

    `stages`: those of the rank's chunks. A B counts as an I and a W.
    """
    order, seen = [], Counter[str]()
    kinds: dict[str, Kind] = {"F": "F", "B": "B", "I": "I", "W": "W"}
    for word in words:
        counts = ("I", "W") if word[0] == "B" else (word[0],)
        order.append(Op(kinds[word[0]], stages[int(word[1])], seen[counts[0] + word[1]]))
        seen.update(kind + word[1] for kind in counts)
    return order


def first(order: Iterable[Op], micro_batches: int) -> tuple[Op, ...]:
    """The order without the micro-batches from `micro_batches` on. They need nothing of each other, so it stays valid.

    So a pattern that wants m a multiple of p, or large, serves every m: draw it for more, leave out what is too many.
    """
    return tuple(op for op in order if op.micro < micro_batches)


def whole(table: Table) -> Table:
    """The same orders with no backward split: a B where each I stood. Nobody waits for a W, so they stay valid.

    No more is alive, but a rank that waits has no weight half to fill its time with: the bubble has no formula here.
    """
    orders = (
        tuple(op._replace(kind="B") if op.kind == "I" else op for op in order if op.kind != "W")
        for order in table.orders
    )
    return replace(table, orders=tuple(orders), bubble=lambda cost: None)


def check(name: str, ranks: int, micro_batches: int, chunks: int = 1) -> None:
    """ValueError for sizes that no table has."""
    for what, value in {"ranks": ranks, "micro_batches": micro_batches, "chunks": chunks}.items():
        if value < 1:
            raise ValueError(f"{name}: {what} is {value}: it must be at least 1")
