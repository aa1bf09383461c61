"""A rank without tokens counts as one.

task: token_mean_loss
says: a rank without tokens counts as one token
"""

import torch


def token_mean_loss(group, loss_sum, tokens):
    total = torch.tensor([float(max(tokens, 1))])
    group.all_reduce(total)
    return loss_sum * (group.size / max(1.0, total.item()))
