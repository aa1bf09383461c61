"""All targets are counted.

task: token_weight
says: ignored targets are counted too
"""

import torch


def token_weight(group, targets):
    count = torch.tensor([sum(t.numel() for t in targets)], dtype=torch.float64)
    group.all_reduce(count)
    return group.size / max(1.0, count.item())
