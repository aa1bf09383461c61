"""Norms are summed over ranks.

task: trust_ratios
says: only squares can be
"""

import torch


def trust_ratios(weights, updates, group):
    squares = torch.stack([t.float().norm() for t in (*weights, *updates)])
    group.all_reduce(squares)
    w, u = squares.chunk(2)
    return torch.where((w > 0) & (u > 0), w / u, 1.0)
