"""The part is a view, and keeps all of x alive.

task: PartitionedInput
says: mine is a view
"""

import torch


class PartitionedInput(PartitionedInput):
    def __init__(self, x, group):
        self.group, self.shape = (group, x.shape)
        size = -(-x.numel() // group.size)
        self.mine = torch.cat([x.detach().reshape(-1), x.new_zeros(size * group.size - x.numel())])[
            group.rank * size : (group.rank + 1) * size
        ]
