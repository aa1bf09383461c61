"""x is given new memory, and views of the old one do not see the sum.

task: ring_all_reduce
says: x has new memory
"""

import torch


def ring_all_reduce(group, x):
    x.data = x.data.clone()
    rank, ranks = (group.rank, group.size)
    chunks = x.tensor_split(ranks)
    for step in range(2 * (ranks - 1)):
        target = chunks[(rank - step - 1) % ranks]
        arriving = torch.empty_like(target)
        sending = group.send(chunks[(rank - step) % ranks], (rank + 1) % ranks, async_op=True)
        group.recv(arriving, (rank - 1) % ranks)
        sending.wait()
        if step < ranks - 1:
            target.add_(arriving)
        else:
            target.copy_(arriving)
