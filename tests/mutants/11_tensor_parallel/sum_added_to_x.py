"""The sum is put into the graph as x + (sum - x), which rounds.

task: leave
says: the sum has other bits on each rank
"""

import torch


def leave(x, group):

    class Leave(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return _total(x, group)

        @staticmethod
        def backward(ctx, grad):
            return grad

    with torch.no_grad():
        total = _total(x, group)
    return x + (total - x.detach())
