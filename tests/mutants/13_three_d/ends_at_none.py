"""The sum ends at the first gradient that is None.

task: global_norm
says: what comes after a gradient of None
"""

import math

import torch


def global_norm(group, gradients):
    total = 0.0
    for g, ranks in gradients:
        if g is None:
            break
        if g is not None and group.rank == min(ranks):
            total += float(g.double().square().sum())
    one = torch.tensor([total], dtype=torch.float64)
    group.all_reduce(one)
    return math.sqrt(one.item())
