"""An eps below the root, so that no norm is zero.

task: trust_ratios
says: something is added to the squares
"""

import torch


def trust_ratios(weights, updates, group):
    sq = torch.tensor([float((t.float() ** 2).sum()) for t in (*weights, *updates)])
    group.all_reduce(sq)
    w, u = (sq + 1e-12).sqrt().chunk(2)
    return torch.where((w > 1e-6) & (u > 1e-6), w / u, torch.ones_like(w))
