"""Multiplies by limit / norm even where the norm is below the limit.

task: unscale_and_clip
says: although the norm is within the limit
"""

import torch


def unscale_and_clip(grads, scale, limit):
    wide = [g.float() / scale for g in grads]
    norm = torch.stack([g.double().pow(2).sum() for g in wide]).sum().sqrt().item()
    return [g * (limit / norm) for g in wide], norm
