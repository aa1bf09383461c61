"""The buffer is the beginning of one that has room for a whole shard more.

task: flatten
says: is a view: it keeps
"""

import torch


def flatten(model, ranks):
    params = [p for p in model.parameters() if p.requires_grad]
    numel = sum(p.numel() for p in params)
    padded = -(-numel // ranks) * ranks
    flat = torch.zeros(2 * padded, dtype=params[0].dtype)[:padded]
    at = 0
    for p in params:
        piece = flat[at : at + p.numel()].view(p.shape)
        piece.copy_(p.detach())
        p.data = piece
        at += p.numel()
    return flat
