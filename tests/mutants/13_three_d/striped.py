"""Every N-th token.

task: zigzag
says: every N-th token
"""

import torch


def zigzag(tokens, ranks):
    if tokens % (2 * ranks):
        raise ValueError(f"{tokens} tokens are not {2 * ranks} equal chunks")
    return [torch.arange(r, tokens, ranks) for r in range(ranks)]
