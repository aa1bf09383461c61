"""The result is a chunk of a copy of x, all of which stays alive.

task: ring_reduce_scatter
says: the result is a view
"""

import torch


def ring_reduce_scatter(group, x):
    rank, ranks = group.rank, group.size
    chunks = x.clone().chunk(ranks)
    for step in range(1, ranks):
        target = chunks[(rank - step - 1) % ranks]
        arriving = torch.empty_like(target)
        sending = group.send(chunks[(rank - step) % ranks], (rank + 1) % ranks, async_op=True)
        group.recv(arriving, (rank - 1) % ranks)
        sending.wait()
        target += arriving
    return chunks[rank]
