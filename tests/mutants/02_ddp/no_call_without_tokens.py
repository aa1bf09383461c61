"""A rank without tokens has no loss to weigh, and returns before the all-reduce in which the others wait for it.

task: token_mean_loss
says: rank 1 has called fewer collectives
"""

import torch


def token_mean_loss(group, loss_sum, tokens):
    if not tokens:
        return 0 * loss_sum
    total = torch.tensor(float(tokens), dtype=torch.float64)
    group.all_reduce(total)
    return loss_sum * group.size / total.item()
