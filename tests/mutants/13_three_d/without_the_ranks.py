"""The factor N is forgotten.

task: token_weight
says: without the factor N
"""

import torch

IGNORED = -100


def token_weight(group, targets):
    count = torch.tensor([sum(int((t != IGNORED).sum()) for t in targets)], dtype=torch.float64)
    group.all_reduce(count)
    return 1 / max(1.0, count.item())
