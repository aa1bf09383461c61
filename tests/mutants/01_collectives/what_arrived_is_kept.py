"""What has arrived is kept in a list, for ever.

task: ring_reduce_scatter
says: keeps
"""

import torch

_ARRIVED = []


def ring_reduce_scatter(group, x):
    rank, ranks = group.rank, group.size
    chunks = x.chunk(ranks)
    partial = chunks[rank - 1]
    for step in range(1, ranks):
        mine = chunks[(rank - 1 - step) % ranks]
        arriving = torch.empty_like(mine)
        sending = group.send(partial, (rank + 1) % ranks, async_op=True)
        group.recv(arriving, (rank - 1) % ranks)
        sending.wait()
        partial = arriving + mine
        _ARRIVED.append(arriving)
    return partial
