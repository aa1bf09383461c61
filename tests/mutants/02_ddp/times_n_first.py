"""Multiplies a loss of 16 bits by N before it divides by the tokens: 60000 times 2 is Inf.

task: token_mean_loss
says: fp16 ends at 65504; divide N by the tokens first
"""

import torch


def token_mean_loss(group, loss_sum, tokens):
    total = torch.tensor([float(tokens)])
    group.all_reduce(total)
    return loss_sum * group.size / max(1.0, total.item())
