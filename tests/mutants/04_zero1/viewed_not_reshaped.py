"""Takes every parameter to be contiguous.

task: flatten
says: flatten raised RuntimeError: view size is not compatible
"""

import torch


def flatten(model, ranks):
    params = [p for p in model.parameters() if p.requires_grad]
    numel = sum(p.numel() for p in params)
    flat = torch.zeros(-(-numel // ranks) * ranks, dtype=params[0].dtype)
    at = 0
    for p in params:
        piece = flat[at : at + p.numel()]
        piece.copy_(p.detach().view(-1))
        p.data = piece.view(p.shape)
        at += p.numel()
    return flat
