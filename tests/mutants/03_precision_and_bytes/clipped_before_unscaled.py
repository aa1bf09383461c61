"""The limit is compared with the norm of the scaled gradients.

task: unscale_and_clip
says: it is clipped before it is unscaled
"""

import torch


def unscale_and_clip(grads, scale, limit):
    wide = [g.float() for g in grads]
    norm = torch.stack([g.pow(2).sum() for g in wide]).sum().sqrt().item()
    factor = min(1.0, limit / norm) / scale
    return [g * factor for g in wide], norm / scale
