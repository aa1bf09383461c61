"""The gradient is gathered as it lies.

task: scatter_sum
says: is not contiguous in memory
"""

import torch


def scatter_sum(x, group):
    class Scatter(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            runs = torch.stack(x.chunk(group.size, 1))
            mine = torch.empty(runs.shape[1:], dtype=x.dtype)
            group.reduce_scatter(mine, runs)
            return mine

        @staticmethod
        def backward(ctx, grad):
            whole = torch.empty(group.size, *grad.shape, dtype=grad.dtype)
            group.all_gather(whole, grad)
            return torch.cat(whole.unbind(), 1)

    return Scatter.apply(x)
