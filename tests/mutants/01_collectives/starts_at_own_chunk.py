"""Each chunk starts at its own rank, so that it is complete one rank too early.

task: ring_reduce_scatter
says: of the sum, expected
"""

import torch


def ring_reduce_scatter(group, x):
    rank, ranks = group.rank, group.size
    chunks = x.chunk(ranks)
    partial = chunks[rank]
    for step in range(1, ranks):
        mine = chunks[(rank - step) % ranks]
        arriving = torch.empty_like(mine)
        sending = group.send(partial, (rank + 1) % ranks, async_op=True)
        group.recv(arriving, (rank - 1) % ranks)
        sending.wait()
        partial = arriving + mine
    return partial
