"""The mean of the counts as torch makes it.

task: rebalance
says: fp32 cannot tell the counts apart
"""

import torch


def rebalance(bias, counts, rate, group):
    total = counts.clone()
    group.all_reduce(total)
    bias += rate * torch.sign(total.float().mean() - total)
