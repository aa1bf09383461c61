"""The whole buffer travels N - 1 times: the right sum, N/2 times the bytes, and other last bits on each rank.

task: ring_all_reduce
says: in 2 calls, not 4
says: send to
"""

import torch


def ring_all_reduce(group, x):
    travelling = x.clone()
    for _ in range(group.size - 1):
        arriving = torch.empty_like(x)
        sending = group.send(travelling, (group.rank + 1) % group.size, async_op=True)
        group.recv(arriving, (group.rank - 1) % group.size)
        sending.wait()
        x += arriving
        travelling = arriving
