"""The room for the chunks is fp32, whatever x is.

task: ring_all_gather
says: dtype torch.float32, expected torch.bfloat16
"""

import torch


def ring_all_gather(group, x):
    rank, ranks = (group.rank, group.size)
    whole = torch.empty(ranks * x.numel())
    chunks = whole.chunk(ranks)
    chunks[rank].copy_(x)
    for step in range(ranks - 1):
        sending = group.send(chunks[(rank - step) % ranks].to(x.dtype), (rank + 1) % ranks, async_op=True)
        arriving = torch.empty_like(x)
        group.recv(arriving, (rank - 1) % ranks)
        chunks[(rank - step - 1) % ranks].copy_(arriving)
        sending.wait()
    return whole
