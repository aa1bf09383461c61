"""The squares of fp16 gradients overflow.

task: unscale_and_clip
says: a square was too large
"""

import torch


def unscale_and_clip(grads, scale, limit):
    norm = torch.stack([g.pow(2).sum() for g in grads]).sum().sqrt().item() / scale
    factor = min(1.0, limit / norm) / scale
    return [g.float() * factor for g in grads], norm
