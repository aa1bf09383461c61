"""Only the gradient that came last is looked at.

task: overflowed
says: look at every element of every gradient
"""

import torch


def overflowed(group, grads):
    bad = bool(grads) and (not bool(torch.isfinite(grads[-1]).all()))
    flag = torch.tensor([float(bad)])
    group.all_reduce(flag, "max")
    return bool(flag)
