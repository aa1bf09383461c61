"""Saves the sum that it returns, for a backward that hands the gradient on.

task: leave
says: stays alive for backward, which needs nothing of it
"""

import torch


def leave(x, group):
    class Leave(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            total = x.clone(memory_format=torch.contiguous_format)
            group.all_reduce(total)
            ctx.save_for_backward(total)
            return total

        @staticmethod
        def backward(ctx, grad):
            return grad

    return Leave.apply(x)
