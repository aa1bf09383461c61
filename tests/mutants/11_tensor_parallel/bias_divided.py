"""Each rank adds an Nth of the bias: its gradient is an Nth too.

task: RowLinear
says: divided by the number of ranks once too often
"""

import torch.nn.functional as F


class RowLinear(RowLinear):
    def forward(self, x):
        bias = None if self.bias is None else self.bias / self.group.size
        return leave(F.linear(x, self.weight, bias), self.group)
