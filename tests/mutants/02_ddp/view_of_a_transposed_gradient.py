"""A gradient that is not contiguous cannot be viewed as a flat tensor.

task: average_gradients
says: view size is not compatible
says: p.grad).view(-1)
"""

import torch


def average_gradients(group, params):
    trained = [p for p in params if p.requires_grad]
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).view(-1) for p in trained])
    group.all_reduce(flat, "mean")
    for p, piece in zip(trained, flat.split([p.numel() for p in trained]), strict=True):
        p.grad = piece.view_as(p)
