"""The part is there, under a name that nobody else knows.

task: PartitionedInput
says: self.mine, this rank's part of x, is missing
"""

import torch


class PartitionedInput:
    def __init__(self, x, group):
        self.group, self.shape = group, x.shape
        size = -(-x.numel() // group.size)
        self.part = torch.zeros(size, dtype=x.dtype)
        part = x.detach().reshape(-1)[group.rank * size : (group.rank + 1) * size]
        self.part[: part.numel()] = part

    def whole(self):
        out = torch.empty(self.part.numel() * self.group.size, dtype=self.part.dtype)
        self.group.all_gather(out, self.part)
        return out[: self.shape.numel()].view(self.shape)
