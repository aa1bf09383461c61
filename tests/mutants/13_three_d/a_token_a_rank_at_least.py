"""The number of tokens is at least that of the ranks.

task: token_weight
says: fewer tokens than ranks count as one a rank
"""

import torch


def token_weight(group, targets):
    count = torch.tensor([sum(int((t != IGNORED).sum()) for t in targets)], dtype=torch.float64)
    group.all_reduce(count)
    return group.size / max(float(group.size), count.item())
