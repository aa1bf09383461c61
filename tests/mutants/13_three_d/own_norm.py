"""Nothing is reduced.

task: global_norm
says: each rank has the norm of its own gradients
"""

import torch


def global_norm(group, gradients):
    squares = torch.zeros(1, dtype=torch.float64)
    for grad, holders in gradients:
        if grad is not None and group.rank == min(holders):
            squares += grad.double().square().sum()
    return squares.sqrt().item()
