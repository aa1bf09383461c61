"""Forward copies x.

task: enter
says: what enter returns is a copy
"""

import torch


def enter(x, group):

    class Enter(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return _total(grad, group)

    return Enter.apply(x)
