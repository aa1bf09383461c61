"""The simulated clock: when each operation of a table begins and ends, if each starts as soon as it can.

An operation begins when its rank is free and what it needs has come. Ranks do not wait to send. The bubble is what a
rank idles between its first operation and its last, the most of all ranks: what a step costs beyond the work when steps
follow one another.
"""

from itertools import accumulate
from typing import NamedTuple

from refimpl.parallel.pipeline.schedules.table import UNIT, Cost, Op, Table, Value


class ScheduleError(ValueError):
    """A table that cannot be run, or does not keep what it states."""


class Span(NamedTuple):
    """Of one operation, on the clock."""

    begin: float
    end: float


def play(table: Table, cost: Cost = UNIT) -> dict[Op, Span]:
    """Every operation's span. ScheduleError if ranks wait for each other for ever, with what each waits for."""
    spans: dict[Op, Span] = {}
    there: dict[Value, float] = {}  # when a value is made, or has come to where it is needed
    free = [0.0] * table.ranks
    waiting = [list(reversed(order)) for order in table.orders]
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(waiting):
            while order and all(value in there for value in order[-1].needs(table.stages)):
                op = order.pop()
                begin = max(
                    [free[rank], *(_arrival(table, op, value, there, cost) for value in op.needs(table.stages))]
                )
                free[rank] = begin + cost.of(op)
                spans[op], moved = Span(begin, free[rank]), True
                if op.gives:
                    there[op.gives] = free[rank]
    if any(waiting):
        stuck = [f"rank {rank} waits to compute {order[-1]}" for rank, order in enumerate(waiting) if order]
        raise ScheduleError(f"{table.name}: ranks wait for each other: {'; '.join(stuck)}")
    return spans


def _arrival(table: Table, op: Op, value: Value, there: dict[Value, float], cost: Cost) -> float:
    """When an operation has a value: messages take their time, what its own rank made takes none."""
    return there[value] + (cost.message if table.receiver(value) is not None and value.stage != op.stage else 0)


def bubble(table: Table, cost: Cost = UNIT) -> float:
    """Idle time inside the span of the rank that idles longest."""
    return max(idle(table, cost))


def idle(table: Table, cost: Cost = UNIT) -> list[float]:
    """Of each rank, between its first operation and its last."""
    spans = play(table, cost)
    return [
        spans[order[-1]].end - spans[order[0]].begin - sum(map(cost.of, order)) if order else 0.0
        for order in table.orders
    ]


def share(table: Table, cost: Cost = UNIT) -> float:
    """The bubble's part of a step: 0 if the busiest rank never idles."""
    busy = max(sum(map(cost.of, order)) for order in table.orders)
    lost = bubble(table, cost)
    return lost / (busy + lost)


def alive(table: Table) -> list[int]:
    """Of each rank, the most (stage, micro-batch) pairs that are between their F and the end of their backward."""
    changes = {"F": 1, "B": -1, "I": 0, "W": -1}
    return [max(accumulate((changes[op.kind] for op in order), initial=0)) for order in table.orders]
