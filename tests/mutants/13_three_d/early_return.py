"""A rank that holds nothing does not take part.

task: global_norm
says: hangs
"""

import torch


def global_norm(group, gradients):
    if not gradients:
        return 0.0
    squares = torch.zeros(1, dtype=torch.float64)
    for grad, holders in gradients:
        if grad is not None and group.rank == min(holders):
            squares += grad.double().square().sum()
    group.all_reduce(squares)
    return squares.sqrt().item()
