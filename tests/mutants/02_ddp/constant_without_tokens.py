"""A rank without tokens returns a loss that hangs on no weight: its backward sends nothing.

task: token_mean_loss
says: returns a constant: no gradient comes from it
"""

import torch


def token_mean_loss(group, loss_sum, tokens):
    total = torch.tensor([float(tokens)])
    group.all_reduce(total)
    if not tokens:
        return torch.zeros([], requires_grad=True)
    return loss_sum * (group.size / total.item())
