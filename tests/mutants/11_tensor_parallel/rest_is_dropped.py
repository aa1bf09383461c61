"""What is left over by the division is dropped.

task: ColumnLinear
says: are accepted: expected a ValueError
"""

import torch
import torch.nn.functional as F
from torch import nn


class ColumnLinear(nn.Module):
    def __init__(self, plain, group):
        super().__init__()
        self.group = group
        self.weight = nn.Parameter(_part(plain.weight, 0, group), plain.weight.requires_grad)
        self.bias = None
        if plain.bias is not None:
            self.bias = nn.Parameter(_part(plain.bias, 0, group), plain.bias.requires_grad)

    def forward(self, x):
        return F.linear(enter(x, self.group), self.weight, self.bias)


def _part(whole, dim, group):
    whole = whole.narrow(dim, 0, whole.shape[dim] // group.size * group.size)
    return whole.detach().chunk(group.size, dim)[group.rank].clone(memory_format=torch.contiguous_format)


def enter(x, group):

    class Enter(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            return _total(grad, group)

    return Enter.apply(x)


def _total(x, group):
    total = x.clone(memory_format=torch.contiguous_format)
    group.all_reduce(total)
    return total
