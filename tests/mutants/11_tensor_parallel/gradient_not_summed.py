"""Backward hands on what arrives.

task: enter
says: this rank's part alone: what the other ranks computed
"""

import torch


def enter(x, group):

    class Enter(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            return grad

    return Enter.apply(x)
