"""Rank 0 alone adds the bias before the sum: the others get no gradient of it.

task: RowLinear
says: the bias has no gradient
"""

import torch.nn.functional as F


class RowLinear(RowLinear):
    def forward(self, x):
        return leave(F.linear(x, self.weight, self.bias if self.group.rank == 0 else None), self.group)
