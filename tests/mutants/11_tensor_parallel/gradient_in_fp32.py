"""A bf16 gradient travels in fp32.

task: enter
says: each all_reduce carries 2x the bytes
"""

import torch


def enter(x, group):

    class Enter(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            return _total(grad.float(), group).to(grad.dtype)

    return Enter.apply(x)
