"""The rows are kept for a backward that needs nothing of them.

task: dispatch
says: dispatch keeps
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
            ctx.save_for_backward(x.clone())
            return move(x, out_of, into)

        @staticmethod
        def backward(ctx, grad):
            return move(grad, into, out_of)

    return Move.apply(x)
