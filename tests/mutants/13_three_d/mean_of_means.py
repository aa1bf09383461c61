"""Each rank divides by its own tokens.

task: token_weight
says: this rank's own tokens divide
"""

import torch


def token_weight(group, targets):
    count = torch.tensor([float(sum(int((t != IGNORED).sum()) for t in targets))])
    group.all_reduce(torch.ones(1))
    return 1 / max(1.0, count.item()) * group.size
