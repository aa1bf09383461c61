"""The first rows read the last ones.

task: bigbird_layout
says: does not go on at the other
"""

import torch


def bigbird_layout(n, width, first, each, rng):
    i = torch.arange(n)
    out = ((i[:, None] - i[None]) % n <= width // 2) | ((i[None] - i[:, None]) % n <= width // 2)
    out[:first] = True
    out[:, :first] = True
    for r in range(n):
        out[r, rng.sample(range(n), each)] = True
    return out
