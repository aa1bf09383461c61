"""Replicated parameters are counted where rank 0 has them.

task: global_norm
says: what several ranks hold is counted only if rank 0 has it
"""

import torch


def global_norm(group, gradients):
    squares = torch.zeros(1, dtype=torch.float64)
    for grad, holders in gradients:
        if grad is not None and (len(holders) == 1 or group.rank == 0):
            squares += grad.double().square().sum()
    group.all_reduce(squares)
    return squares.sqrt().item()
