"""Rows of other tokens are multiplied by zero, which leaves Inf a NaN.

task: vocab_embedding
says: the result: it holds NaN or Inf
"""

import torch
import torch.nn.functional as F


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


def vocab_embedding(ids, part, first, group):
    elsewhere = (ids < first) | (ids >= first + len(part))
    rows = F.embedding((ids - first).masked_fill(elsewhere, 0), part)
    return leave(rows * (~elsewhere).unsqueeze(-1), group)
