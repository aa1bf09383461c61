"""All parts are gathered and added: N times the bytes of a half.

task: leave
says: uses all_gather, expected only all_reduce
"""

import torch


def leave(x, group):

    class Leave(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            out = x.new_empty(group.size, *x.shape)
            group.all_gather(out, x.contiguous())
            return out.sum(0)

        @staticmethod
        def backward(ctx, grad):
            return grad

    return Leave.apply(x)


def _total(x, group):
    total = x.clone(memory_format=torch.contiguous_format)
    group.all_reduce(total)
    return total
