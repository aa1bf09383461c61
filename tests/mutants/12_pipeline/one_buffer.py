"""One buffer receives every micro-batch's input.

task: Stage
says: after finish() the stage keeps
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from refimpl.comm.group import Group


class Stage(Stage):
    def __init__(self, module: nn.Module, group: Group, loss: Callable[[Tensor, Any], Tensor], like: Tensor) -> None:
        self.module, self.group, self.loss, self.like = module, group, loss, like
        self.buffer: Tensor | None = None
        self.kept: dict[int, Any] = {}  # micro-batch -> what its backward needs
        self.sending: dict[int, Any] = {}  # neighbour -> the send to it that was begun last

    def forward(self, micro: int, inputs: Tensor | None = None, target: Any = None) -> Tensor | None:
        group, is_last = self.group, self.group.rank == self.group.size - 1
        if group.rank > 0:
            if self.buffer is None:
                self.buffer = torch.empty_like(self.like)
            group.recv(self.buffer, group.rank - 1)
            inputs = self.buffer.detach().requires_grad_()
        out = self.module(inputs)
        if is_last:
            out = self.loss(out, target)
        result = out.detach() if is_last else None
        self.kept[micro] = inputs, get_gradient_edge(out), result
        if not is_last:
            self.send(out.detach(), group.rank + 1)
        return result
