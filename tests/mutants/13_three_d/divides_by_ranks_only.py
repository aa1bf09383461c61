"""Only the number of ranks must divide.

task: zigzag
says: ValueError is expected
"""

import torch


def zigzag(tokens, ranks):
    if tokens % ranks:
        raise ValueError(f"{tokens} tokens are not {2 * ranks} equal chunks")
    chunks = torch.arange(tokens).tensor_split(2 * ranks)
    return [torch.cat([chunks[r], chunks[2 * ranks - 1 - r]]) for r in range(ranks)]
