"""The same lists as on the way there.

task: give_back
says: give_back
"""

import torch


def give_back(answers, counts, sizes, group):
    there = counts.view(group.size, -1).sum(1).tolist()
    return _moved(answers, there, sizes.sum(1).tolist(), group)


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
            return move(grad, into, out_of)

    return Move.apply(x)
