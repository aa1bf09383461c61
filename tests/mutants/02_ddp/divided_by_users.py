"""The mean over those ranks alone that have a gradient.

task: average_gradients
says: ranks that used this layer
"""

import torch


def average_gradients(group, params):
    trained = [p for p in params if p.requires_grad]
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in trained])
    used = torch.tensor([float(p.grad is not None) for p in trained])
    group.all_reduce(used)
    group.all_reduce(flat)
    flat /= torch.cat([u.expand(p.numel()) for u, p in zip(used, trained, strict=True)])
    for p, piece in zip(trained, flat.split([p.numel() for p in trained]), strict=True):
        p.grad = piece.view_as(p)
