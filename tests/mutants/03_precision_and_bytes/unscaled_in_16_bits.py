"""Unscaled gradients go through 16 bits again: what loss scaling has saved is lost after all.

task: unscale_and_clip
says: went through torch.float16 again after it was unscaled
"""

import torch


def unscale_and_clip(grads, scale, limit):
    unscaled = [(g.float() / scale).to(g.dtype).float() for g in grads]
    true = [g.float() / scale for g in grads]
    norm = torch.stack([g.double().pow(2).sum() for g in true]).sum().sqrt().item()
    if norm > limit:
        for g in unscaled:
            g.mul_(limit / norm)
    return unscaled, norm
