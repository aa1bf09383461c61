"""The gradient of the weight, which is of this rank's outputs alone, is all-reduced.

task: gathered_linear
says: each has other outputs
"""

import torch
import torch.nn.functional as F


def gathered_linear(x, weight, bias, group):

    def every(x):
        out = x.new_empty(group.size, *x.shape)
        group.all_gather(out, x.detach().contiguous())
        return torch.cat(list(out), 1)

    class Linear(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, bias):
            ctx.save_for_backward(x if weight.requires_grad else None, weight)
            return F.linear(every(x), weight, bias)

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            parts = torch.stack((grad @ weight).chunk(group.size, 1)).contiguous()
            of_x, of_weight = torch.empty_like(parts[0]), None
            group.reduce_scatter(of_x, parts)
            if x is not None:
                of_weight = grad.flatten(0, 1).T @ every(x).flatten(0, 1)
                group.all_reduce(of_weight)
            return of_x, of_weight, grad.sum((0, 1))

    return Linear.apply(x, weight, bias)
