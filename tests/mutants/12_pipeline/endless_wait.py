"""Goes round for ever where ranks wait for each other.

task: play
says: never ends
"""

from collections.abc import Mapping, Sequence


def play(orders: Sequence[Sequence[Op]], seconds: Mapping[str, float]) -> dict[Op, tuple[float, float]]:
    last = max((stage for order in orders for _, stage, _ in order), default=0)
    spans: dict[Op, tuple[float, float]] = {}
    left = [list(reversed(order)) for order in orders]
    free = [0.0] * len(orders)
    while any(left):
        for rank, ops in enumerate(left):
            while ops and (comes := _ready(ops[-1], spans, last)) is not None:
                op = ops.pop()
                begin = max([free[rank], *comes])
                free[rank] = begin + seconds[op[0]]
                spans[op] = begin, free[rank]
    return spans
