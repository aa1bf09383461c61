"""x is saved for the gradient of a weight that gets none.

task: gathered_linear
says: where the weight is frozen, backward needs no x
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from refimpl.comm.group import Group


def gathered_linear(x: Tensor, weight: Tensor, bias: Tensor, group: Group) -> Tensor:

    class Gathered(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return F.linear(_all_tokens(x, group), weight, bias)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
            x, weight = ctx.saved_tensors
            rows = grad.flatten(0, 1)
            of_weight = None
            if ctx.needs_input_grad[1]:
                of_weight = rows.t() @ _all_tokens(x, group).flatten(0, 1)
            return _own_tokens(grad @ weight, group), of_weight, rows.sum(0)

    return Gathered.apply(x, weight, bias)  # type: ignore[no-any-return,no-untyped-call]
