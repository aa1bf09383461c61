"""The buffer is padded, so that every chunk has n/N elements rounded up: right, and too many bytes.

task: ring_all_reduce
says: all ranks together send
says: is x padded?
"""

import torch


def ring_all_reduce(group, x):
    rank, ranks = group.rank, group.size
    padded = torch.nn.functional.pad(x, (0, -len(x) % ranks))
    chunks = padded.chunk(ranks)
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
    x.copy_(padded[: len(x)])
