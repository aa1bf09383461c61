"""The mean is written into a contiguous copy of the gradient, which nobody sees.

task: average_gradients
says: the mean was written into a copy
"""

import torch


def average_gradients(group, params):
    trained = [p for p in params if p.requires_grad]
    for p in trained:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    flat = torch.cat([p.grad.reshape(-1) for p in trained])
    group.all_reduce(flat, "mean")
    for p, piece in zip(trained, flat.split([p.numel() for p in trained]), strict=True):
        p.grad.contiguous().copy_(piece.view_as(p))
