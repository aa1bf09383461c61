"""A product with one-hot rows, in which zero times Inf is NaN.

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
    rows = F.one_hot((ids - first).masked_fill(elsewhere, 0), len(part)).to(part.dtype) @ part
    return leave(rows.masked_fill(elsewhere.unsqueeze(-1), 0), group)
