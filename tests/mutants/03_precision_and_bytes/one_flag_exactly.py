"""Flags are summed, and the sum is compared with 1: two ranks that overflow count as none.

task: overflowed
says: every rank holds inf
"""

import torch


def overflowed(group, grads):
    bad = any(not bool(torch.isfinite(g).all()) for g in grads)
    flag = torch.tensor([float(bad)])
    group.all_reduce(flag, "sum")
    return flag.item() == 1
