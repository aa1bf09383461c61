"""The room for the chunks is made once for each size, and handed out again by the next call.

task: ring_all_gather
says: the next call overwrites
"""

import torch

ROOM = {}


def ring_all_gather(group, x):
    rank, ranks = group.rank, group.size
    whole = ROOM.setdefault((x.shape, x.dtype), torch.empty(ranks * x.numel(), dtype=x.dtype))
    chunks = whole.chunk(ranks)
    chunks[rank].copy_(x)
    for step in range(ranks - 1):
        sending = group.send(chunks[(rank - step) % ranks], (rank + 1) % ranks, async_op=True)
        group.recv(chunks[(rank - step - 1) % ranks], (rank - 1) % ranks)
        sending.wait()
    return whole
