"""A millionth is added to the norm.

task: unscale_and_clip
says: gradient 0: wrong values
"""

import torch


def unscale_and_clip(grads, scale, limit):
    unscaled = [g.float() / scale for g in grads]
    norm = torch.stack([g.double().pow(2).sum() for g in unscaled]).sum().sqrt().item()
    if norm > limit:
        for g in unscaled:
            g.mul_(limit / (norm + 1e-06))
    return (unscaled, norm)
