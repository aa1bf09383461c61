"""Every rank begins with its own chunk, which so ends at its left neighbour.

task: ring_reduce_scatter
says: did chunk c start at rank c + 1
"""

import torch


def ring_reduce_scatter(group, x):
    rank, ranks = group.rank, group.size
    chunks = x.clone().chunk(ranks)
    for step in range(ranks - 1):
        target = chunks[(rank - step - 1) % ranks]
        arriving = torch.empty_like(target)
        sending = group.send(chunks[(rank - step) % ranks], (rank + 1) % ranks, async_op=True)
        group.recv(arriving, (rank - 1) % ranks)
        sending.wait()
        target += arriving
    return chunks[rank].clone()
