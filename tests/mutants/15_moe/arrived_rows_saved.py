"""Saves the rows that arrived, for a backward that knows the numbers.

task: dispatch
says: what arrived stays alive for backward
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
            out = move(x, out_of, into)
            ctx.save_for_backward(out)
            return out

        @staticmethod
        def backward(ctx, grad):
            return move(grad, into, out_of)

    return Move.apply(x)
