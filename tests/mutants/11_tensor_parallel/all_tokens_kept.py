"""All tokens are kept for the gradient of the weight.

task: gathered_linear
says: all tokens are gathered once more in backward
"""

import torch
import torch.nn.functional as F


def gathered_linear(x, weight, bias, group):

    class Gathered(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, bias):
            x = _all_tokens(x, group)
            ctx.save_for_backward(x, weight)
            return F.linear(x, weight, bias)

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            rows = grad.flatten(0, 1)
            of_weight = None
            if ctx.needs_input_grad[1]:
                of_weight = rows.t() @ x.flatten(0, 1)
            return (_own_tokens(grad @ weight, group), of_weight, rows.sum(0))

    return Gathered.apply(x, weight, bias)
