"""A contiguous copy is summed, and what arrived goes on.

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
            group.all_reduce(grad.clone() if grad.is_contiguous() else grad.contiguous())
            return grad

    return Enter.apply(x)
