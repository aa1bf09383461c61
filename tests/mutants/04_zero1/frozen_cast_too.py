"""Frozen parameters are put into the dtype of the trained ones.

task: flatten
says: frozen.weight after flatten has dtype
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
    for p in model.parameters():
        if not p.requires_grad:
            p.data = p.data.to(flat.dtype)
    return flat
