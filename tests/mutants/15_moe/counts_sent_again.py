"""Backward sends the numbers once more.

task: dispatch
says: backward of dispatch
"""

import torch


def _moved(x, out_of, into, group):

    def move(x, out_of, into):
        out = x.new_empty(sum(into), x.shape[1])
        group.all_to_all(out, x.contiguous(), out_splits=into, in_splits=out_of)
        return out

    class Move(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return move(x, out_of, into)

        @staticmethod
        def backward(ctx, grad):
            group.all_to_all(torch.empty(group.size), torch.ones(group.size))
            return move(grad, into, out_of)

    return Move.apply(x)
