"""Row after row.

task: block_lists
says: a loop over rows
"""

import torch
from torch import Tensor


def block_lists(layout: Tensor) -> tuple[Tensor, Tensor]:
    starts, blocks = [0], []
    for row in layout.flatten(0, 1):
        blocks.append(row.nonzero().flatten())
        starts.append(starts[-1] + len(blocks[-1]))
    return torch.tensor(starts), torch.cat(blocks)
