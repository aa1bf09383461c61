"""The mean number of tokens of a rank multiplies.

task: token_weight
says: upside down
"""

import torch


def token_weight(group, targets):
    count = torch.tensor([sum(int((t != -100).sum()) for t in targets)], dtype=torch.float64)
    group.all_reduce(count)
    return max(1.0, count.item()) / group.size
