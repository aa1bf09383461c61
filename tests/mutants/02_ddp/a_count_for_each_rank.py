"""Every rank's number travels, where their sum is enough.

task: token_mean_loss
says: only the sum of the tokens is needed
"""

import torch


def token_mean_loss(group, loss_sum, tokens):
    counts = torch.zeros(8 * group.size)
    counts[group.rank] = tokens
    group.all_reduce(counts)
    total = counts.sum()
    return loss_sum * (group.size / max(1.0, total.item()))
