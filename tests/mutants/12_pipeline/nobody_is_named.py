"""A deadlock is an error that names no rank.

task: play
says: the error does not name rank 0
"""

from collections.abc import Mapping, Sequence

Op = tuple[str, int, int]


def _ready(op: Op, spans: Mapping[Op, tuple[float, float]], last: int) -> list[float] | None:
    kind, stage, k = op
    needs: list[tuple[Op, ...]] = []  # of each, one of these
    if kind == "F" and stage > 0:
        needs = [(("F", stage - 1, k),)]
    if kind == "W":
        needs = [(("I", stage, k),)]
    if kind in "BI":
        needs = [(("F", stage, k),)]
        needs += [(("B", stage + 1, k), ("I", stage + 1, k))] if stage < last else []
    ends = [[spans[other][1] for other in either if other in spans] for either in needs]
    return [found[0] for found in ends] if all(ends) else None


def play(orders: Sequence[Sequence[Op]], seconds: Mapping[str, float]) -> dict[Op, tuple[float, float]]:
    last = max((stage for order in orders for _, stage, _ in order), default=0)
    spans: dict[Op, tuple[float, float]] = {}
    left = [list(reversed(order)) for order in orders]
    free = [0.0] * len(orders)
    while any(left):
        moved = False
        for rank, ops in enumerate(left):
            while ops and (comes := _ready(ops[-1], spans, last)) is not None:
                op = ops.pop()
                begin = max([free[rank], *comes])
                free[rank] = begin + seconds[op[0]]
                spans[op], moved = (begin, free[rank]), True
        if not moved:
            stuck = [f"rank {rank} waits to compute {ops[-1]}" for rank, ops in enumerate(left) if ops]
            raise ValueError(f"nobody goes on: {len(stuck)} wait")
    return spans
