"""What is not finite is left out.

task: global_norm
says: it must make them so, on all ranks
"""

import torch


def global_norm(group, gradients):
    squares = torch.zeros(1, dtype=torch.float64)
    for grad, holders in gradients:
        if grad is not None and group.rank == min(holders):
            squares += grad.nan_to_num(0, 0, 0).double().square().sum()
    group.all_reduce(squares)
    return squares.sqrt().item()
