"""Squares of 16-bit gradients are taken in fp32.

task: global_norm
says: a square was too large
"""

import torch


def global_norm(group, gradients):
    squares = torch.zeros(1, dtype=torch.float64)
    for grad, holders in gradients:
        if grad is not None and group.rank == min(holders):
            squares += (
                grad.to(torch.float32).square().sum().double()
                if grad.dtype != torch.float32
                else grad.double().square().sum()
            )
    group.all_reduce(squares)
    return squares.sqrt().item()
