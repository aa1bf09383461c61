"""whole() lets go of the part.

task: PartitionedInput
says: is invalid for input of size 0
"""

import torch


class PartitionedInput(PartitionedInput):
    def whole(self):
        out = torch.empty(self.mine.numel() * self.group.size, dtype=self.mine.dtype)
        self.group.all_gather(out, self.mine)
        self.mine = self.mine[:0]
        return out[: self.shape.numel()].view(self.shape)
