"""0/0 where no rank has a token.

task: token_mean_loss
says: no rank has any token, and the gradient is NaN
"""

import torch


def token_mean_loss(group, loss_sum, tokens):
    total = torch.tensor([float(tokens)])
    group.all_reduce(total)
    return loss_sum * group.size / total
