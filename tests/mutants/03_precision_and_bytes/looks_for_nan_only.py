"""An overflow is an Inf first; it becomes NaN only later.

task: overflowed
says: inf is not finite
"""

import torch


def overflowed(group, grads):
    flag = torch.tensor([float(any(bool(torch.isnan(g).any()) for g in grads))])
    group.all_reduce(flag, "max")
    return bool(flag)
