"""The rows that read each column.

task: block_lists
says: these are lists of the columns
"""

import torch
from torch import Tensor


def block_lists(layout: Tensor) -> tuple[Tensor, Tensor]:
    counts = layout.sum(-1).flatten()
    starts = torch.zeros(counts.numel() + 1, dtype=torch.int64)
    starts[1:] = counts.cumsum(0)
    return starts, layout.transpose(1, 2).nonzero()[:, -1]
