"""reduce_scatter takes x as it lies: samples are dealt out, not tokens.

task: scatter_sum
says: the sequences are mixed
"""

import torch


def scatter_sum(x, group):
    return _exchange(x, group, _own_tokens, _all_tokens)


def _all_tokens(x, group):
    out = x.new_empty(group.size, *x.shape)
    group.all_gather(out, x.contiguous())
    return out.transpose(0, 1).flatten(1, 2)


def _exchange(x, group, there, back):

    class Exchange(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return there(x, group)

        @staticmethod
        def backward(ctx, grad):
            return back(grad, group)

    return Exchange.apply(x)


def _own_tokens(x, group):
    runs = x.contiguous().view(group.size, x.shape[0], -1, x.shape[2])
    mine = torch.empty_like(runs[0])
    group.reduce_scatter(mine, runs)
    return mine
