"""What comes back is a leaf that requires a gradient, as x may have been.

task: PartitionedInput
says: whole() requires a gradient
"""

import torch


class PartitionedInput(PartitionedInput):
    def whole(self):
        out = torch.empty(self.mine.numel() * self.group.size, dtype=self.mine.dtype)
        self.group.all_gather(out, self.mine)
        return out[: self.shape.numel()].view(self.shape).requires_grad_(out.is_floating_point())
