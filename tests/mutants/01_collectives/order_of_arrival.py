"""Chunks are appended as they come.

task: ring_all_gather
says: in the order of arrival, not in rank order
"""

import torch


def ring_all_gather(group, x):
    chunks = [x]
    for _ in range(group.size - 1):
        arriving = torch.empty_like(x)
        sending = group.send(chunks[-1], (group.rank + 1) % group.size, async_op=True)
        group.recv(arriving, (group.rank - 1) % group.size)
        sending.wait()
        chunks.append(arriving)
    return torch.cat(chunks)
