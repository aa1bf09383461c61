"""The number of tokens is all-reduced in 16 bits.

task: token_mean_loss
says: 16 bits count to 256 only
"""

import torch


def token_mean_loss(group, loss_sum, tokens):
    total = torch.tensor([float(tokens)], dtype=torch.bfloat16)
    group.all_reduce(total)
    return loss_sum * (group.size / max(1.0, total.item()))
