"""bf16 gradients travel in fp32, and come back as bf16.

task: average_gradients
says: each all_reduce carries 2x the bytes
"""

import torch


def average_gradients(group, params):
    trained = [p for p in params if p.requires_grad]
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in trained])
    wide = flat.float()
    group.all_reduce(wide, "mean")
    flat = wide.to(flat.dtype)
    for p, piece in zip(trained, flat.split([p.numel() for p in trained]), strict=True):
        p.grad = piece.view_as(p)
