"""Frozen parameters are flattened with the others.

task: flatten
says: of them are frozen parameters
"""

import torch


def flatten(model, ranks):
    params = list(model.parameters())
    numel = sum(p.numel() for p in params)
    flat = torch.zeros(-(-numel // ranks) * ranks, dtype=params[0].dtype)
    at = 0
    for p in params:
        piece = flat[at : at + p.numel()].view(p.shape)
        piece.copy_(p.detach())
        p.data = piece
        at += p.numel()
    return flat
