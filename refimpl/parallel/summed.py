"""Parameters that every rank holds whole, but uses for its own tokens or heads: their gradients are parts of a sum.

A norm under sequence parallelism, a norm over the features of a head. A hook on the parameter sums what each rank has,
2 n (N-1)/N bytes for n. It is set at a call of the module, because a copy of a module has the module's hooks, but not
those of its parameters.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from refimpl.comm.group import Group


def sum_gradients(module: nn.Module, names: list[str], group: Group) -> None:
    """Of the module's own parameters that are called `names`."""
    if group.size > 1:
        module.register_forward_pre_hook(partial(_hook, names, group))


def _hook(names: list[str], group: Group, module: nn.Module, args: Any) -> None:
    for name in names:
        p = module._parameters[name]
        if p is not None and p.requires_grad and not hasattr(p, "summed"):
            p.summed = p.register_hook(partial(_summed, group))  # type: ignore[attr-defined, no-untyped-call]


def _summed(group: Group, grad: Tensor) -> Tensor:
    grad = grad.clone(memory_format=torch.contiguous_format)
    group.all_reduce(grad, tag="tensor, whole parameters")
    return grad
