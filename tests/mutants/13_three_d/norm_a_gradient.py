"""Each gradient's norm is taken, and the norms are added up.

task: global_norm
says: norms of single gradients were added
"""

import torch


def global_norm(group, gradients):
    total = torch.zeros(1, dtype=torch.float64)
    for grad, holders in gradients:
        if grad is not None and group.rank == min(holders):
            total += grad.double().norm()
    group.all_reduce(total)
    return total.item()
