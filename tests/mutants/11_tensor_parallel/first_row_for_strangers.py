"""No zeros for what is elsewhere.

task: vocab_embedding
says: a token of another rank's looks up a row of this one
"""

import torch
import torch.nn.functional as F


def vocab_embedding(ids, part, first, group):
    elsewhere = (ids < first) | (ids >= first + len(part))
    rows = F.embedding((ids - first).masked_fill(elsewhere, 0), part)
    return leave(rows, group)


def leave(x, group):

    class Leave(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return _total(x, group)

        @staticmethod
        def backward(ctx, grad):
            return grad

    return Leave.apply(x)


def _total(x, group):
    total = x.clone(memory_format=torch.contiguous_format)
    group.all_reduce(total)
    return total
