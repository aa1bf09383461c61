"""Backward puts its own tokens into zeros.

task: scatter_sum
says: zeros for the other ranks' tokens
"""

import torch


def scatter_sum(x, group):
    return _exchange(x, group, _own_tokens, _padded)


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
    runs = torch.stack(x.chunk(group.size, 1))
    mine = torch.empty_like(runs[0])
    group.reduce_scatter(mine, runs)
    return mine


def _padded(grad, group):
    zeros = grad.new_zeros(grad.shape[0], grad.shape[1] * group.size, grad.shape[2])
    zeros.chunk(group.size, 1)[group.rank].copy_(grad)
    return zeros
