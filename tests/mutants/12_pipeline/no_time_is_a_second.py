"""A kind that takes no time takes a second.

task: play
says: takes 1 s, expected 0
"""


def play(orders, seconds):
    last = max((stage for order in orders for _, stage, _ in order), default=0)
    spans = {}
    left = [list(reversed(order)) for order in orders]
    free = [0.0] * len(orders)
    while any(left):
        moved = False
        for rank, ops in enumerate(left):
            while ops and (comes := _ready(ops[-1], spans, last)) is not None:
                op = ops.pop()
                begin = max([free[rank], *comes])
                free[rank] = begin + (seconds.get(op[0]) or 1.0)
                spans[op], moved = ((begin, free[rank]), True)
        if not moved:
            stuck = [f"rank {rank} waits to compute {ops[-1]}" for rank, ops in enumerate(left) if ops]
            raise ValueError(f"nobody goes on: {', '.join(stuck)}")
    return spans
