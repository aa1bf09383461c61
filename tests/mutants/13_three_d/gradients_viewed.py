"""Takes gradients for contiguous.

task: global_norm
says: view size is not compatible
"""

import torch


def global_norm(group, gradients):
    squares = torch.zeros(1, dtype=torch.float64)
    for grad, holders in gradients:
        if grad is not None and group.rank == min(holders):
            squares += torch.dot(grad.double().view(-1), grad.double().view(-1))
    group.all_reduce(squares)
    return squares.sqrt().item()
