"""Only the first element of each gradient is looked at.

task: overflowed
says: look at every element of every gradient
"""

import torch


def overflowed(group, grads):
    bad = any(not bool(torch.isfinite(g.flatten()[0])) for g in grads)
    flag = torch.tensor([float(bad)])
    group.all_reduce(flag, "max")
    return bool(flag)
