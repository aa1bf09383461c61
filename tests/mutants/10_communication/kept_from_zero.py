"""An eps below the fraction, as in other optimizers: a layer that hardly moves is held back.

task: trust_ratios
says: something is added to |u|
"""

import torch


def trust_ratios(weights, updates, group):
    squares = torch.stack([t.float().square().sum() for t in (*weights, *updates)])
    group.all_reduce(squares)
    w, u = squares.sqrt().chunk(2)
    return torch.where((w > 0) & (u > 0), w / (u + 1e-6), 1.0)
