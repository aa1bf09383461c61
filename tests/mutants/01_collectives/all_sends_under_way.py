"""No send is waited for before the next.

task: ring_reduce_scatter
says: sends under way at once
"""

import torch


def ring_reduce_scatter(group, x):
    rank, ranks = (group.rank, group.size)
    chunks = x.chunk(ranks)
    partial = chunks[rank - 1]
    flying = []
    for step in range(1, ranks):
        mine = chunks[(rank - 1 - step) % ranks]
        arriving = torch.empty_like(mine)
        sending = group.send(partial, (rank + 1) % ranks, async_op=True)
        group.recv(arriving, (rank - 1) % ranks)
        flying.append((sending, partial))
        partial = arriving + mine
    for sending, _ in flying:
        sending.wait()
    return partial
