"""Every holder counts.

task: global_norm
says: what several ranks hold is counted by each of them
"""

import torch


def global_norm(group, gradients):
    squares = torch.zeros(1, dtype=torch.float64)
    for grad, _ in gradients:
        if grad is not None:
            squares += grad.double().square().sum()
    group.all_reduce(squares)
    return squares.sqrt().item()
