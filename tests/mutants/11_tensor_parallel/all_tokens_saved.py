"""Saves the N times larger result of the gather.

task: gather_tokens
says: stays alive for backward, which needs nothing of it
"""

import torch


def gather_tokens(x, group):
    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            out = _all_tokens(x, group)
            ctx.save_for_backward(out)
            return out

        @staticmethod
        def backward(ctx, grad):
            return _own_tokens(grad, group)

    return Gather.apply(x)
