"""What is shared is left out.

task: global_norm
says: what several ranks hold is not counted at all
"""

import torch


def global_norm(group, gradients):
    squares = torch.zeros(1, dtype=torch.float64)
    for grad, holders in gradients:
        if grad is not None and len(holders) == 1:
            squares += grad.double().square().sum()
    group.all_reduce(squares)
    return squares.sqrt().item()
