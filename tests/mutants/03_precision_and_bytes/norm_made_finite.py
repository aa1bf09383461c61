"""An infinite norm is made finite.

task: unscale_and_clip
says: an overflow must be seen
"""

import torch


def unscale_and_clip(grads, scale, limit):
    unscaled = [g.float() / scale for g in grads]
    norm = torch.stack([g.double().pow(2).sum() for g in unscaled]).sum().sqrt().item()
    if norm > limit:
        for g in unscaled:
            g.mul_(limit / norm)
    return (unscaled, min(norm, 3.4e38))
