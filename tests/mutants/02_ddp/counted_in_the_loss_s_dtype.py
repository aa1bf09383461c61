"""Tokens are counted in the dtype of the loss.

task: token_mean_loss
says: fp16 ends at 65504
"""

import torch


def token_mean_loss(group, loss_sum, tokens):
    total = torch.tensor([float(tokens)], dtype=loss_sum.dtype)
    group.all_reduce(total)
    return loss_sum * (group.size / max(1.0, total.item()))
