"""The window is half of `width` rounded up on each side.

task: bigbird_layout
says: the window is wider than `width`
"""

import random

import torch
from torch import Tensor


def bigbird_layout(n: int, width: int, first: int, each: int, rng: random.Random) -> Tensor:
    block = torch.arange(n)
    layout = (block[:, None] - block).abs() <= (width + 1) // 2
    layout[:first] = True
    layout[:, :first] = True
    for row in range(n):
        layout[row, rng.sample(range(n), each)] = True
    return layout
