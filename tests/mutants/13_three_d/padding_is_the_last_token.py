"""-1 counts from the end.

task: context_batch
says: index -1 counts from the end
"""

import torch


def context_batch(tokens, positions):
    following = torch.cat([tokens[:, 1:], torch.full_like(tokens[:, :1], IGNORED)], 1)
    padding = positions < 0
    inputs = tokens[:, positions]
    return (inputs, following[:, positions].masked_fill(padding, IGNORED))
