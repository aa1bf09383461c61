"""A frozen bias is a parameter that learns.

task: ColumnLinear
says: what is frozen there stays frozen
"""

import torch
import torch.nn.functional as F
from torch import nn


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        g = g.clone(memory_format=torch.contiguous_format)
        ctx.group.all_reduce(g)
        return (g, None)


class ColumnLinear(nn.Module):
    def __init__(self, plain, group):
        super().__init__()
        M, N = (plain.out_features, group.size)
        if M % N:
            raise ValueError(f"{M} outputs, {N} ranks")
        self.group = group
        part = slice(group.rank * M // N, (group.rank + 1) * M // N)
        self.weight = nn.Parameter(plain.weight.detach()[part].clone(), plain.weight.requires_grad)
        self.bias = None if plain.bias is None else nn.Parameter(plain.bias.detach()[part].clone())

    def forward(self, x):
        return F.linear(_Enter.apply(x, self.group), self.weight, self.bias)
