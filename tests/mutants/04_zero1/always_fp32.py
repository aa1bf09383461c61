"""The buffer has the default dtype.

task: flatten
says: dtype torch.float32, expected torch.bfloat16
"""

import torch


def flatten(model, ranks):
    params = [p for p in model.parameters() if p.requires_grad]
    numel = sum(p.numel() for p in params)
    flat = torch.zeros(-(-numel // ranks) * ranks)
    at = 0
    for p in params:
        piece = flat[at : at + p.numel()].view(p.shape)
        piece.copy_(p.detach())
        p.data = piece
        at += p.numel()
    return flat
