"""A sum of all elements is looked at, which itself overflows.

task: overflowed
says: only a sum of them is not
"""

import torch


def overflowed(group, grads):
    bad = not bool(torch.isfinite(sum((g.sum() for g in grads), torch.zeros(()))))
    flag = torch.tensor([float(bad)])
    group.all_reduce(flag, "max")
    return bool(flag)
