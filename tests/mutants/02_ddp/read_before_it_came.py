"""The means are taken out of the buffer before its all-reduce was waited for.

task: average_gradients
says: not yet: wait() first
"""

import torch


def average_gradients(group, params):
    trained = [p for p in params if p.requires_grad]
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in trained])
    work = group.all_reduce(flat, "mean", async_op=True)
    for p, piece in zip(trained, flat.split([p.numel() for p in trained]), strict=True):
        p.grad = piece.view_as(p).clone()
    work.wait()
