"""Every chunk is rounded up, and the last are short or empty.

task: ring_all_reduce
says: rounded up or down: cut evenly
"""

import torch


def ring_all_reduce(group, x):
    rank, ranks = (group.rank, group.size)
    size = -(-len(x) // ranks)
    chunks = [x[i * size : (i + 1) * size] for i in range(ranks)]
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
