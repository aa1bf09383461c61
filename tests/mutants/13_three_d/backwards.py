"""The second chunk runs backwards.

task: zigzag
says: the second chunk runs backwards
"""

import torch


def zigzag(tokens, ranks):
    if tokens % (2 * ranks):
        raise ValueError(f"{tokens} tokens are not {2 * ranks} equal chunks")
    chunks = torch.arange(tokens).chunk(2 * ranks)
    return [torch.cat([chunks[r], chunks[2 * ranks - 1 - r].flip(0)]) for r in range(ranks)]
