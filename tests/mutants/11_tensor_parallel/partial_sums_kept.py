"""x is saved for a backward that does not need it.

task: leave
says: backward needs nothing of x
"""

import torch


def leave(x, group):

    class Leave(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return _total(x, group)

        @staticmethod
        def backward(ctx, grad):
            return grad

    return Leave.apply(x)
