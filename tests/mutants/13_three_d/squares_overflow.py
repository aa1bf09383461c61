"""Squares are made in the gradient's dtype.

task: global_norm
says: a square was too large for its dtype
"""

import torch


def global_norm(group, gradients):
    squares = torch.zeros(1, dtype=torch.float64)
    for grad, holders in gradients:
        if grad is not None and group.rank == min(holders):
            squares += grad.square().sum()
    group.all_reduce(squares)
    return squares.sqrt().item()
