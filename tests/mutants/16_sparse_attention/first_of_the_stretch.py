"""The first block of each stretch represents it.

task: fixed_layout
says: not its first
"""

import torch
from torch import Tensor


def fixed_layout(n: int, local: int, causal: bool) -> Tensor:
    block = torch.arange(n)
    layout = block[:, None] // local == block // local
    last = torch.arange(n) % local == 0
    layout = layout | last
    return layout.tril() if causal else layout
