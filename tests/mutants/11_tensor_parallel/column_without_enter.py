"""No f: outputs and own gradients are right.

task: ColumnLinear
says: x enters every rank
"""

import torch.nn.functional as F


class ColumnLinear(ColumnLinear):
    def forward(self, x):
        return F.linear(x, self.weight, self.bias)
