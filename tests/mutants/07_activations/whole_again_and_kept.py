"""What whole() has gathered stays in the object.

task: PartitionedInput
says: after whole() PartitionedInput keeps
"""

import torch


class PartitionedInput(PartitionedInput):
    def whole(self):
        out = torch.empty(self.mine.numel() * self.group.size, dtype=self.mine.dtype)
        self.group.all_gather(out, self.mine)
        self.out = out
        return out[: self.shape.numel()].view(self.shape)
