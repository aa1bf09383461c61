"""A rank without tokens returns a constant, of which no backward can be called.

task: balance_loss
says: of a rank without tokens has no gradient
"""

import torch


def balance_loss(logits, experts, group):
    T, E = logits.shape
    counts = torch.bincount(experts.flatten(), minlength=E)
    group.all_reduce(counts)
    f = counts.float() / counts.sum().clamp(min=1)
    if not T:
        return torch.tensor(0.0)
    P = logits.float().softmax(-1).sum(0) / max(T, 1)
    return E * (f * P).sum()
