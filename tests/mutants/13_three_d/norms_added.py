"""The norms are added up.

task: global_norm
says: it is the sum of the ranks' norms
"""

import torch


def global_norm(group, gradients):
    squares = torch.zeros(1, dtype=torch.float64)
    for grad, holders in gradients:
        if grad is not None and group.rank == min(holders):
            squares += grad.double().square().sum()
    squares = squares.sqrt()
    group.all_reduce(squares)
    return squares.item()
