"""The bias hears of this rank's tokens alone.

task: gathered_linear
says: the gradient of the bias: of this rank's tokens alone
"""

import torch


def gathered_linear(x, weight, bias, group):
    class Gathered(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, bias):
            ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
            return F.linear(_all_tokens(x, group), weight, bias)

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            rows = grad.flatten(0, 1)
            w = None
            if ctx.needs_input_grad[1]:
                w = rows.t() @ _all_tokens(x, group).flatten(0, 1)
            own = grad.chunk(group.size, 1)[group.rank].flatten(0, 1)
            return _own_tokens(grad @ weight, group), w, own.sum(0)

    return Gathered.apply(x, weight, bias)
