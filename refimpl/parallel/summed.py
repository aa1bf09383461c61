"""Parameters that every rank holds whole, but uses for its own tokens or heads: their gradients are parts of a sum.

A norm under sequence parallelism, a norm over the features of a head, experts that see a rank's tokens; or in part:
keys in a matrix that has queries too. A hook on the parameter sums what each rank has, 2 n (N-1)/N bytes for n. It is
set at a call of the module, for a copy of a module has the module's hooks, but not those of its parameters.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from refimpl.comm.group import Group

Where = tuple[int, Sequence[slice]]  # of a parameter: these spans along this dimension


def sum_gradients(module: nn.Module, names: list[str], group: Group, where: Mapping[str, Where] | None = None) -> None:
    """Of the module's own parameters that are called `names`; of those in `where` these spans alone."""
    if group.size > 1:
        module.register_forward_pre_hook(partial(_hook, names, group, where or {}))


def _hook(names: list[str], group: Group, where: Mapping[str, Where], module: nn.Module, args: Any) -> None:
    for name in names:
        if (p := module._parameters[name]) is not None:
            sum_gradient(p, group, "tensor, whole parameters", where.get(name))


def sum_gradient(p: Tensor, group: Group, tag: str, where: Where | None = None) -> None:
    """From the next backward pass on; once, however often it is asked for."""
    if p.requires_grad and not hasattr(p, "summed"):
        p.summed = p.register_hook(partial(_summed, group, tag, where))  # type: ignore[attr-defined, no-untyped-call]


def _summed(group: Group, tag: str, where: Where | None, grad: Tensor) -> Tensor:
    grad = grad.clone(memory_format=torch.contiguous_format)
    dim, spans = where or (0, ())
    for part in [grad.narrow(dim, span.start, span.stop - span.start) for span in spans] or [grad]:
        group.all_reduce(part, tag=tag)  # contiguous: rows, or all of it (see `ColumnParallelLinear`)
    return grad
