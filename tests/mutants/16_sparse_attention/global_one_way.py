"""Global blocks are read, and do not read.

task: bigbird_layout
says: their rows are missing
"""

import random

import torch
from torch import Tensor


def bigbird_layout(n: int, width: int, first: int, each: int, rng: random.Random) -> Tensor:
    block = torch.arange(n)
    layout = (block[:, None] - block).abs() <= width // 2
    layout[:, :first] = True
    for row in range(n):
        layout[row, rng.sample(range(n), each)] = True
    return layout
