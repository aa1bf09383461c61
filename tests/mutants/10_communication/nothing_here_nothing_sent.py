"""A rank that holds nothing leaves before the all-reduce.

task: trust_ratios
says: has left before the all-reduce
"""

import torch


def trust_ratios(weights, updates, group):
    sums = torch.zeros(len(weights), 2)
    for i, (w, u) in enumerate(zip(weights, updates, strict=True)):
        sums[i, 0] = w.float().square().sum()
        sums[i, 1] = u.float().square().sum()
    if any(w.numel() for w in weights):
        group.all_reduce(sums)
    w, u = sums.sqrt().unbind(1)
    return torch.where((w == 0) | (u == 0), 1.0, w / u)
