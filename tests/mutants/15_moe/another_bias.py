"""The bias is put into new memory.

task: rebalance
says: bias lies in other memory now
"""

import torch


def rebalance(bias, counts, rate, group):
    total = counts.clone()
    group.all_reduce(total)
    bias.data = bias + rate * torch.sign(total.sum() - total * len(total)).to(bias.dtype)
