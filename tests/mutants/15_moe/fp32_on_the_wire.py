"""Rows travel in fp32 whatever they are.

task: dispatch
says: dispatch sends
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
            return move(x.float(), out_of, into).to(x.dtype)

        @staticmethod
        def backward(ctx, grad):
            return move(grad.float(), into, out_of).to(grad.dtype)

    return Move.apply(x)
