"""A mean of zero becomes None.

task: average_gradients
says: its mean is zero
"""

import torch


def average_gradients(group, params):
    trained = [p for p in params if p.requires_grad]
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in trained])
    group.all_reduce(flat, "mean")
    for p, piece in zip(trained, flat.split([p.numel() for p in trained]), strict=True):
        p.grad = piece.view_as(p) if piece.any() else None
