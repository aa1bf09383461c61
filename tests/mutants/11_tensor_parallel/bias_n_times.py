"""Each rank adds the bias to its part of the sum.

task: RowLinear
says: the bias counts
"""

import torch.nn.functional as F


class RowLinear(RowLinear):
    def forward(self, x):
        return leave(F.linear(x, self.weight, self.bias), self.group)
