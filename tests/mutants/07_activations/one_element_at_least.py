"""Of nothing, one element is kept.

task: PartitionedInput
says: expected 0
"""

import torch


class PartitionedInput(PartitionedInput):
    def __init__(self, x, group):
        self.group, self.shape = (group, x.shape)
        size = max(1, -(-x.numel() // group.size))
        self.mine = torch.zeros(size, dtype=x.dtype)
        part = x.detach().reshape(-1)[group.rank * size : (group.rank + 1) * size]
        self.mine[: part.numel()] = part
