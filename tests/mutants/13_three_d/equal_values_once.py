"""Gradients of equal values are taken for one parameter.

task: global_norm
says: expected
"""

import torch


def global_norm(group, gradients):
    squares = torch.zeros(1, dtype=torch.float64)
    for grad, _ in gradients:
        if grad is not None:
            squares += grad.double().square().sum()
    everyone = torch.zeros(group.size, dtype=torch.float64)
    everyone[group.rank] = squares
    group.all_reduce(everyone)
    return sum(set(everyone.tolist())) ** 0.5
