"""The mean of the counts, but at least 1: two tokens on four ranks weigh half of what they should.

task: token_mean_loss
says: fewer tokens than ranks count as one a rank
"""

import torch


def token_mean_loss(group, loss_sum, tokens):
    count = torch.tensor([float(tokens)])
    group.all_reduce(count, "mean")
    return loss_sum / max(1.0, count.item())
