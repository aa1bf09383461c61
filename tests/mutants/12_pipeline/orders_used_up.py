"""Takes the operations out of the caller's lists.

task: play
says: the caller's list
"""

from collections.abc import Mapping, Sequence


def play(orders: Sequence[Sequence[Op]], seconds: Mapping[str, float]) -> dict[Op, tuple[float, float]]:
    last = max((stage for order in orders for _, stage, _ in order), default=0)
    spans: dict[Op, tuple[float, float]] = {}
    left = orders
    free = [0.0] * len(orders)
    while any(left):
        moved = False
        for rank, ops in enumerate(left):
            while ops and (comes := _ready(ops[0], spans, last)) is not None:
                op = ops.pop(0)
                begin = max([free[rank], *comes])
                free[rank] = begin + seconds[op[0]]
                spans[op], moved = (begin, free[rank]), True
        if not moved:
            stuck = [f"rank {rank} waits to compute {ops[0]}" for rank, ops in enumerate(left) if ops]
            raise ValueError(f"nobody goes on: {', '.join(stuck)}")
    return spans
