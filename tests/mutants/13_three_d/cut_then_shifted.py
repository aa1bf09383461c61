"""The rank shifts what it has.

task: context_batch
says: shifted after cutting
"""

import torch


def context_batch(tokens, positions):
    inputs = tokens[:, positions].masked_fill(positions < 0, 0)
    return inputs, torch.cat([inputs[:, 1:], torch.full_like(inputs[:, :1], IGNORED)], 1)
