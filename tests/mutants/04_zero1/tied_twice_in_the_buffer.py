"""A tied weight is named twice, and lies in the buffer twice.

task: flatten
says: the tied weight, one tensor of two names, is in it twice
"""

import torch


def flatten(model, ranks):
    params = [p for _, p in model.named_parameters(remove_duplicate=False) if p.requires_grad]
    numel = sum(p.numel() for p in params)
    flat = torch.zeros(-(-numel // ranks) * ranks, dtype=params[0].dtype)
    at = 0
    for p in params:
        piece = flat[at : at + p.numel()].view(p.shape)
        piece.copy_(p.detach())
        p.data = piece
        at += p.numel()
    return flat
