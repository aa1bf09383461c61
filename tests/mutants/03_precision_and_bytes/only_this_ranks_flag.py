"""Looks at this rank's gradients only: one rank skips the step, the others take it.

task: overflowed
says: the ranks must agree
"""

import torch


def overflowed(group, grads):
    return any(not bool(torch.isfinite(g).all()) for g in grads)
