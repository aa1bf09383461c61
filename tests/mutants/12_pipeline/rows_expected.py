"""x without leading dimensions is not expected.

task: split_linear
says: Dimension out of range
"""

import torch


def split_linear(x, weight, bias, later):

    class Split(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, bias):
            ctx.save_for_backward(x)
            return x @ weight.T + bias

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            held = [grad.flatten(0, -2), x.detach().flatten(0, -2)]

            def weight_half():
                grad, x = held
                held.clear()
                for p, more in ((weight, lambda: grad.T @ x), (bias, lambda: grad.sum(0))):
                    if p.requires_grad:
                        p.grad = more() if p.grad is None else p.grad + more()

            if weight.requires_grad or bias.requires_grad:
                later.append(weight_half)
            return (grad @ weight.detach() if ctx.needs_input_grad[0] else None, None, None)

    return Split.apply(x, weight, bias)
