"""Each rank with the norm of its part.

task: trust_ratios
says: the norm is the layer's
"""

import torch


def trust_ratios(weights, updates, group):
    squares = torch.stack([t.float().square().sum() for t in (*weights, *updates)])
    group.all_reduce(squares.clone())
    w, u = squares.sqrt().chunk(2)
    return torch.where((w > 0) & (u > 0), w / u, 1.0)
