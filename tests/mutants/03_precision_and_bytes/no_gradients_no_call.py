"""A rank without gradients returns at once, and the others wait for it.

task: overflowed
says: some ranks have finished while others still wait
"""

import torch


def overflowed(group, grads):
    if not grads:
        return False
    flag = torch.tensor([float(any(not bool(torch.isfinite(g).all()) for g in grads))])
    group.all_reduce(flag, "max")
    return bool(flag)
