"""Every rank waits until its send is received before it receives.

task: ring_all_gather
says: every rank waits until its send is received, and none receives
"""

import torch


def ring_all_gather(group, x):
    chunks = [torch.empty_like(x) for _ in range(group.size)]
    chunks[group.rank] = x
    for step in range(group.size - 1):
        group.send(chunks[(group.rank - step) % group.size], (group.rank + 1) % group.size)
        group.recv(chunks[(group.rank - step - 1) % group.size], (group.rank - 1) % group.size)
    return torch.cat(chunks)
