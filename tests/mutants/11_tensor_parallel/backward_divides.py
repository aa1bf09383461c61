"""Backward takes the mean for the transpose of a sum.

task: scatter_sum
says: exactly 1/2 of the expected
"""

import torch


def scatter_sum(x, group):
    class S(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            runs = x.reshape(x.shape[0], group.size, -1, x.shape[2]).transpose(0, 1).contiguous()
            mine = torch.empty_like(runs[0])
            group.reduce_scatter(mine, runs)
            return mine

        @staticmethod
        def backward(ctx, g):
            out = g.new_empty(group.size, *g.shape)
            group.all_gather(out, g.contiguous())
            return out.transpose(0, 1).reshape(g.shape[0], -1, g.shape[2]) / group.size

    return S.apply(x)
