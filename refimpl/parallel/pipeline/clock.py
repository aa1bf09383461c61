"""The simulated clock: when each operation of a table begins and ends, if each starts as soon as it can.

An operation begins when its rank is free and what it needs has come. Ranks do not wait to send. The bubble is what a
rank idles between its first operation and its last, the most of all ranks: what a step costs beyond the work when steps
follow one another.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from refimpl.parallel.pipeline.schedules.table import UNIT, Durations, Op, Table, Value


class ScheduleError(ValueError):
    """A table that cannot be run, or does not keep what it states."""


class Span(NamedTuple):
    """Of one operation, on the clock."""

    begin: float
    end: float


def play(table: Table, cost: Durations = UNIT, pairs: bool = False) -> dict[Op, Span]:
    """Every operation's span. ScheduleError if ranks wait for each other for ever, with what each waits for.

    pairs: an F and a B right behind it run as one operation, whose results come at its end, as DualPipe's do.
    """
    spans: dict[Op, Span] = {}
    there: dict[Value, float] = {}  # when a value is made
    free = [0.0] * table.ranks
    waiting = [list(reversed(units(order, pairs))) for order in table.orders]
    moved = True
    while moved:
        moved = False
        for rank, left in enumerate(waiting):
            while left and all(value in there for _, value in needs(left[-1], table.stages)):
                unit = left.pop()
                comes = [_arrival(table, op, value, there, cost) for op, value in needs(unit, table.stages)]
                begin = max([free[rank], *comes])
                free[rank], moved = begin + sum(map(cost.of, unit)), True
                spans |= dict.fromkeys(unit, Span(begin, free[rank]))
                there |= {op.gives: free[rank] for op in unit if op.gives}
    if any(waiting):
        stuck = [f"rank {rank} waits to compute {left[-1][0]}" for rank, left in enumerate(waiting) if left]
        raise ScheduleError(f"{table.name}: ranks wait for each other: {'; '.join(stuck)}")
    return spans


def units(order: Sequence[Op], pairs: bool) -> list[tuple[Op, ...]]:
    """What runs as one."""
    found: list[tuple[Op, ...]] = []
    for op in order:
        if pairs and op.kind == "B" and found and [other.kind for other in found[-1]] == ["F"]:
            found[-1] += (op,)
        else:
            found.append((op,))
    return found


def needs(unit: Sequence[Op], stages: int) -> list[tuple[Op, Value]]:
    """(operation, value) for what must be there before they begin, but for what they give each other."""
    given = {op.gives for op in unit}
    return [(op, value) for op in unit for value in op.needs(stages) if value not in given]


def _arrival(table: Table, op: Op, value: Value, there: dict[Value, float], cost: Durations) -> float:
    """When an operation has a value: messages take their time, what its own rank made takes none."""
    return there[value] + (cost.message if table.receiver(value) is not None and value.stage != op.stage else 0)


def bubble(table: Table, cost: Durations = UNIT, pairs: bool = False) -> float:
    """Idle time inside the span of the rank that idles longest."""
    return max(idle(table, cost, pairs))


def idle(table: Table, cost: Durations = UNIT, pairs: bool = False) -> list[float]:
    """Of each rank, between its first operation and its last."""
    spans = play(table, cost, pairs)
    return [
        spans[order[-1]].end - spans[order[0]].begin - sum(map(cost.of, order)) if order else 0.0
        for order in table.orders
    ]


def share(table: Table, cost: Durations = UNIT) -> float:
    """The bubble's part of a step: 0 if the busiest rank never idles."""
    busy = max(sum(map(cost.of, order)) for order in table.orders)
    lost = bubble(table, cost)
    return lost / (busy + lost)


def alive(table: Table) -> list[int]:
    """Of each rank, the most (stage, micro-batch) pairs that are between their F and the end of their backward."""
    changes = {"F": 1, "B": -1, "I": 0, "W": -1}
    return [max(accumulate((changes[op.kind] for op in order), initial=0)) for order in table.orders]
