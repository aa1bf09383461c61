"""The buffer that becomes the result is kept for the next call, which overwrites it.

task: ring_reduce_scatter
says: the next call overwrites
"""

import torch

BUFFERS = {}


def ring_reduce_scatter(group, x):
    rank, ranks = group.rank, group.size
    chunks = x.view(ranks, -1)  # [N, s]
    total = chunks[rank - 1].clone()
    for step in range(2, ranks + 1):
        last = step == ranks
        arriving = BUFFERS.setdefault((total.shape, total.dtype), total.clone()) if last else torch.empty_like(total)
        sending = group.send(total, (rank + 1) % ranks, async_op=True)
        group.recv(arriving, (rank - 1) % ranks)
        sending.wait()
        total = arriving.add_(chunks[(rank - step) % ranks])
    return total
