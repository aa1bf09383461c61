"""A rank begins an operation while it still computes another.

task: play
says: its rank still computes
"""

from collections.abc import Mapping, Sequence


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
                begin = max([0.0, *comes])
                free[rank] = begin + seconds[op[0]]
                spans[op], moved = (begin, free[rank]), True
        if not moved:
            stuck = [f"rank {rank} waits to compute {ops[-1]}" for rank, ops in enumerate(left) if ops]
            raise ValueError(f"nobody goes on: {', '.join(stuck)}")
    return spans
