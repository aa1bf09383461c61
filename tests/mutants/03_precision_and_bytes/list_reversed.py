"""The caller's list is turned round.

task: unscale_and_clip
says: the caller's list `grads` was changed
"""

import torch


def unscale_and_clip(grads, scale, limit):
    unscaled = [g.float() / scale for g in grads]
    norm = torch.stack([g.double().pow(2).sum() for g in unscaled]).sum().sqrt().item()
    if norm > limit:
        for g in unscaled:
            g.mul_(limit / norm)
    grads.reverse()
    return (unscaled, norm)
