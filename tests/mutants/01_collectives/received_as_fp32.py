"""What arrives is taken for fp32, whatever x is.

task: ring_reduce_scatter
says: torch.bfloat16
"""

import torch


def ring_reduce_scatter(group, x):
    rank, ranks = (group.rank, group.size)
    chunks = x.chunk(ranks)
    partial = chunks[rank - 1]
    for step in range(1, ranks):
        mine = chunks[(rank - 1 - step) % ranks]
        arriving = torch.empty(mine.shape)
        sending = group.send(partial, (rank + 1) % ranks, async_op=True)
        group.recv(arriving, (rank - 1) % ranks)
        sending.wait()
        partial = arriving + mine
    return partial
