"""Squares are taken in fp32.

task: unscale_and_clip
says: a square was too large
"""

import torch


def unscale_and_clip(grads, scale, limit):
    unscaled = [g.float() / scale for g in grads]
    norm = torch.stack([g.pow(2).sum() for g in unscaled]).sum().sqrt().item()
    if norm > limit:
        for g in unscaled:
            g.mul_(limit / norm)
    return (unscaled, norm)
