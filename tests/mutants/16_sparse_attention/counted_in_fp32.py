"""Adds up the counts in fp32, which knows no odd number above 2^24.

task: block_lists
says: fp32 counts to 2^24 only
"""

import torch


def block_lists(layout):
    counts = layout.float().sum(-1).flatten().cumsum(0)
    return torch.cat([torch.zeros(1), counts]).long(), layout.nonzero()[:, -1]
