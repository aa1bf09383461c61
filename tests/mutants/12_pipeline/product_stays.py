"""Keeps its output too, by save_for_backward.

task: split_linear
says: the output stays alive for backward
"""

import torch


def split_linear(x, weight, bias, later):
    class Split(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, bias):
            out = x @ weight.T + bias
            ctx.save_for_backward(x, out)
            return out

        @staticmethod
        def backward(ctx, grad):
            held = [grad.reshape(-1, grad.shape[-1]), ctx.saved_tensors[0].detach().reshape(-1, x.shape[-1])]

            def weight_half():
                grad, x = held
                held.clear()
                for p, more in ((weight, lambda: grad.T @ x), (bias, lambda: grad.sum(0))):
                    if p.requires_grad:
                        p.grad = more() if p.grad is None else p.grad + more()

            if weight.requires_grad or bias.requires_grad:
                later.append(weight_half)
            return grad @ weight.detach() if ctx.needs_input_grad[0] else None, None, None

    return Split.apply(x, weight, bias)
