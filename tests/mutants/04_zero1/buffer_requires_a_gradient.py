"""The buffer is a leaf that requires a gradient.

task: flatten
says: the buffer requires a gradient
"""

import torch


def flatten(model, ranks):
    params = [p for p in model.parameters() if p.requires_grad]
    numel = sum(p.numel() for p in params)
    flat = torch.zeros(-(-numel // ranks) * ranks, dtype=params[0].dtype)
    at = 0
    for p in params:
        piece = flat[at : at + p.numel()].view(p.shape)
        piece.copy_(p.detach())
        p.data = piece
        at += p.numel()
    return flat.requires_grad_()
