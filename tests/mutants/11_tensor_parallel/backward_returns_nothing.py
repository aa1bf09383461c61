"""The sum is made, and not returned.

task: enter
says: nothing comes back through what enter returns
"""

import torch


def enter(x, group):
    class Enter(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            total = grad.clone(memory_format=torch.contiguous_format)
            group.all_reduce(total)

    return Enter.apply(x)
