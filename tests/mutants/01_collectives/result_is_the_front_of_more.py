"""The result is the front of a buffer that is one chunk longer, all of which stays alive.

task: ring_all_gather
says: the result is a view
"""

import torch


def ring_all_gather(group, x):
    rank, ranks = group.rank, group.size
    whole = torch.empty((ranks + 1) * x.numel(), dtype=x.dtype)[: ranks * x.numel()]
    chunks = whole.chunk(ranks)
    chunks[rank].copy_(x)
    for step in range(ranks - 1):
        sending = group.send(chunks[(rank - step) % ranks], (rank + 1) % ranks, async_op=True)
        group.recv(chunks[(rank - step - 1) % ranks], (rank - 1) % ranks)
        sending.wait()
    return whole
