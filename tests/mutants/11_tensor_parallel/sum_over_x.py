"""The sum is made in the memory of x.

task: leave
says: x was changed
"""

import torch


def leave(x, group):

    class Leave(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            total = x.contiguous()
            group.all_reduce(total)
            return total.view_as(total)

        @staticmethod
        def backward(ctx, grad):
            return grad

    return Leave.apply(x)
