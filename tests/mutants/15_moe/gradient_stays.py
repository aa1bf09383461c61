"""Backward hands the gradient on where it is, cut or filled to size.

task: give_back
says: the gradient of the answers
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
            return torch.cat([grad, grad.new_zeros(sum(out_of), grad.shape[1])])[: sum(out_of)]

    return Move.apply(x)
