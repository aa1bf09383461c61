"""Tokens are counted in bf16.

task: token_weight
says: the count was rounded
"""

import torch


def token_weight(group, targets):
    count = torch.tensor([sum(int((t != IGNORED).sum()) for t in targets)], dtype=torch.bfloat16)
    group.all_reduce(count)
    return group.size / max(1.0, count.item())
