"""A rank whose gradient is zero does not take part.

task: enter
says: what the other ranks computed from x is missing
"""

import torch


def enter(x, group):

    class Enter(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            if not grad.any():
                return grad
            return _total(grad, group)

    return Enter.apply(x)
