"""Backward gathers the tokens also where no weight is trained.

task: gathered_linear
says: backward with a frozen weight
"""

import torch
import torch.nn.functional as F


def gathered_linear(x, weight, bias, group):

    class Gathered(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, bias):
            ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
            ctx.like = x.shape
            return F.linear(_all_tokens(x, group), weight, bias)

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            x = weight.new_zeros(ctx.like) if x is None else x
            rows = grad.flatten(0, 1)
            of_weight = rows.t() @ _all_tokens(x, group).flatten(0, 1)
            of_weight = of_weight if ctx.needs_input_grad[1] else None
            return (_own_tokens(grad @ weight, group), of_weight, rows.sum(0))

    return Gathered.apply(x, weight, bias)
