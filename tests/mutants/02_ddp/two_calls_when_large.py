"""More than 100,000 elements go in several calls.

task: average_gradients
says: calls, not 1
"""

import torch


def average_gradients(group, params):
    trained = [p for p in params if p.requires_grad]
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in trained])
    for part in flat.split(100000):
        group.all_reduce(part, "mean")
    for p, piece in zip(trained, flat.split([p.numel() for p in trained]), strict=True):
        p.grad = piece.view_as(p)
