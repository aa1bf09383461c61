"""The gradient that arrives is summed in place.

task: enter
says: the_gradient_that_arrives was changed
"""

import torch


def enter(x, group):

    class Enter(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            grad = grad.contiguous()
            group.all_reduce(grad)
            return grad

    return Enter.apply(x)
