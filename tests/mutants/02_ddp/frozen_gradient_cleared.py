"""Frozen parameters lose the gradient that they had.

task: average_gradients
says: a frozen parameter's gradient was changed
"""

import torch


def average_gradients(group, params):
    trained = [p for p in params if p.requires_grad]
    for p in params:
        if not p.requires_grad:
            p.grad = None
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in trained])
    group.all_reduce(flat, "mean")
    for p, piece in zip(trained, flat.split([p.numel() for p in trained]), strict=True):
        p.grad = piece.view_as(p)
