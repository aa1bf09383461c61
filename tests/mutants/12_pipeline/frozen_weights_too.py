"""Does not ask whether weight and bias require a gradient.

task: split_linear
says: is frozen, and its weight half gave it a gradient
"""

from typing import Any

import torch
from torch import Tensor


def split_linear(x: Tensor, weight: Tensor, bias: Tensor, later: list[Any]) -> Tensor:

    class Split(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x @ weight.T + bias

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            (x,) = ctx.saved_tensors
            held = [grad.reshape(-1, grad.shape[-1]), x.detach().reshape(-1, x.shape[-1])]

            def weight_half() -> None:
                grad, x = held
                held.clear()
                for p, more in ((weight, lambda: grad.T @ x), (bias, lambda: grad.sum(0))):
                    p.grad = more() if p.grad is None else p.grad + more()

            if weight.requires_grad or bias.requires_grad:
                later.append(weight_half)
            return grad @ weight.detach() if ctx.needs_input_grad[0] else None, None, None

    return Split.apply(x, weight, bias)
