"""A last stretch of one block is taken to belong to the stretch before it.

task: fixed_layout
says: row 8 reads block 4, and must not
"""

import torch


def fixed_layout(n, local, causal):
    block = torch.arange(n)
    stretch = block // local
    if n > local and n % local == 1:
        stretch[-1] = stretch[-2]
    layout = stretch[:, None] == stretch
    last = torch.arange(n) % local == local - 1
    last[-1:] = True
    layout = layout | last
    return layout.tril() if causal else layout
