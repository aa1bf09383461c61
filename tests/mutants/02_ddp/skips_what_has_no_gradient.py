"""Parameters without a gradient are left out, so that ranks reduce buffers of different lengths.

task: average_gradients
says: buffers of different lengths
says: rank 0                    rank 1
"""

import torch


def average_gradients(group, params):
    trained = [p for p in params if p.grad is not None]
    flat = torch.cat([p.grad.reshape(-1) for p in trained])
    group.all_reduce(flat, "mean")
    for p, piece in zip(trained, flat.split([p.numel() for p in trained]), strict=True):
        p.grad = piece.view_as(p)
