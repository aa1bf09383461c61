"""Chunks r and r + N.

task: zigzag
says: the last rank has the most work
"""

import torch


def zigzag(tokens, ranks):
    if tokens % (2 * ranks):
        raise ValueError(f"{tokens} tokens are not {2 * ranks} equal chunks")
    chunks = torch.arange(tokens).chunk(2 * ranks)
    return [torch.cat([chunks[r], chunks[ranks + r]]) for r in range(ranks)]
