"""The gradient of the weight is made of the tokens that are kept.

task: gathered_linear
says: of this rank's tokens alone
"""

import torch
import torch.nn.functional as F


def gathered_linear(x, weight, bias, group):

    class Gathered(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, bias):
            ctx.save_for_backward(x, weight)
            return F.linear(_all_tokens(x, group), weight, bias)

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            rows = grad.flatten(0, 1)
            of_weight = None
            if ctx.needs_input_grad[1]:
                of_weight = grad.chunk(group.size, 1)[group.rank].flatten(0, 1).t() @ x.flatten(0, 1)
            return (_own_tokens(grad @ weight, group), of_weight, rows.sum(0))

    return Gathered.apply(x, weight, bias)
