"""The parameters' first memory is kept beside the buffer.

task: flatten
says: where are the first values
"""

import torch


def flatten(model, ranks):
    params = [p for p in model.parameters() if p.requires_grad]
    numel = sum(p.numel() for p in params)
    flat = torch.zeros(-(-numel // ranks) * ranks, dtype=params[0].dtype)
    at = 0
    flat.before = [p.data for p in params]
    for p in params:
        piece = flat[at : at + p.numel()].view(p.shape)
        piece.copy_(p.detach())
        p.data = piece
        at += p.numel()
    return flat
