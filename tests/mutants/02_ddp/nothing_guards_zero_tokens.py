"""A division by zero where no rank has a token.

task: token_mean_loss
says: ZeroDivisionError
"""

import torch


def token_mean_loss(group, loss_sum, tokens):
    total = torch.tensor([float(tokens)])
    group.all_reduce(total)
    return loss_sum * (group.size / total.item())
