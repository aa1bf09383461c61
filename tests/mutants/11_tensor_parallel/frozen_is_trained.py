"""A frozen weight comes to life.

task: ColumnLinear
says: requires_grad is not as in the plain layer
"""

import torch.nn.functional as F
from torch import nn


class ColumnLinear(nn.Module):
    def __init__(self, plain, group):
        super().__init__()
        self.group = group
        self.weight = nn.Parameter(_part(plain.weight, 0, group))
        self.bias = None
        if plain.bias is not None:
            self.bias = nn.Parameter(_part(plain.bias, 0, group), plain.bias.requires_grad)

    def forward(self, x):
        return F.linear(enter(x, self.group), self.weight, self.bias)
