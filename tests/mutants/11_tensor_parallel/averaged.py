"""The mean, as of data-parallel gradients.

task: enter
says: the mean over the ranks
"""

import torch


def enter(x, group):

    class Enter(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            return _total(grad, group) / group.size

    return Enter.apply(x)
