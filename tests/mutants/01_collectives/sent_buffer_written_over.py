"""The buffer that is being sent gets the next partial sum before its send was waited for.

task: ring_reduce_scatter
says: memory changed while its send to
"""

import torch


def ring_reduce_scatter(group, x):
    rank, ranks = (group.rank, group.size)
    chunks = x.chunk(ranks)
    partial = chunks[rank - 1].clone()
    for step in range(1, ranks):
        mine = chunks[(rank - 1 - step) % ranks]
        arriving = torch.empty_like(mine)
        sending = group.send(partial, (rank + 1) % ranks, async_op=True)
        group.recv(arriving, (rank - 1) % ranks)
        partial.copy_(arriving + mine)
        sending.wait()
    return partial
