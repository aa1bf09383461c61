"""Elements are clamped to the limit.

task: unscale_and_clip
says: each element is clamped
"""

import torch


def unscale_and_clip(grads, scale, limit):
    unscaled = [g.float() / scale for g in grads]
    norm = torch.stack([g.double().pow(2).sum() for g in unscaled]).sum().sqrt().item()
    if norm > limit:
        for g in unscaled:
            g.clamp_(-limit, limit)
    return (unscaled, norm)
