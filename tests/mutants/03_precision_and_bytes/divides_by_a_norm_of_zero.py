"""The factor is computed also where all gradients are zero.

task: unscale_and_clip
says: ZeroDivisionError
"""

import torch


def unscale_and_clip(grads, scale, limit):
    unscaled = [g.float() / scale for g in grads]
    norm = torch.stack([g.double().pow(2).sum() for g in unscaled]).sum().sqrt().item()
    for g in unscaled:
        g.mul_(min(1.0, limit / norm))
    return (unscaled, norm)
