"""The first holder counts, and each rank names itself first.

task: global_norm
says: counted by each of them
"""

import torch


def global_norm(group, gradients):
    squares = torch.zeros(1, dtype=torch.float64)
    for grad, holders in gradients:
        if grad is not None and group.rank == holders[0]:
            squares += grad.double().square().sum()
    group.all_reduce(squares)
    return squares.sqrt().item()
