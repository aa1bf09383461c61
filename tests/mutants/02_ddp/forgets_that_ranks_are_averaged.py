"""Divides by all tokens, and forgets that the ranks' gradients are averaged afterwards.

task: token_mean_loss
says: divided by the number of ranks once too often
"""

import torch


def token_mean_loss(group, loss_sum, tokens):
    total = torch.tensor([float(tokens)])
    group.all_reduce(total)
    return loss_sum / total.item()
