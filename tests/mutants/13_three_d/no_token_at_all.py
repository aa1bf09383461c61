"""Division by zero.

task: token_weight
says: 0 times that spoils all weights
"""

import torch


def token_weight(group, targets):
    count = torch.tensor([float(sum(int((t != IGNORED).sum()) for t in targets))])
    group.all_reduce(count)
    return (group.size / count).item()
