"""Token 0 is taken for padding.

task: context_batch
says: token 0 has no target
"""

import torch


def context_batch(tokens, positions):
    T = tokens.shape[1]
    real = positions >= 0
    inputs = torch.where(real, tokens[:, positions.clamp(min=0)], 0)
    has = real & (positions < T - 1)
    targets = torch.where(has, tokens[:, (positions + 1).clamp(0, T - 1)], IGNORED)
    targets[inputs == 0] = IGNORED
    return (inputs, targets)
