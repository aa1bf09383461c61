"""x is saved for the gradient of a weight that gets none.

task: gathered_linear
says: where the weight is frozen, backward needs no x
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from refimpl.comm.group import Group


def _all_tokens(x: Tensor, group: Group) -> Tensor:
    out = x.new_empty(group.size, *x.shape)  # [N, B, T/N, C]
    group.all_gather(out, x.contiguous())
    return out.transpose(0, 1).flatten(1, 2)


def _own_tokens(x: Tensor, group: Group) -> Tensor:
    runs = torch.stack(x.chunk(group.size, 1))  # [N, B, T/N, C]
    mine = torch.empty_like(runs[0])
    group.reduce_scatter(mine, runs)
    return mine


def gathered_linear(x: Tensor, weight: Tensor, bias: Tensor, group: Group) -> Tensor:
    """F.linear(gather_tokens(x, group), weight, bias), which does not keep all tokens for
    backward.

    x [B, T/N, K], weight [M/N, K], bias [M/N] -> [B, T, M/N]. The gradient of the weight needs
    all tokens of x; kept is x alone, and backward gathers them once more: two all-gathers and
    one reduce-scatter in all (Korthikanti et al. 2022, section 4.2.2). A frozen weight needs no
    tokens: then x is not kept, and backward does not gather. It is an autograd.Function.
    """

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
