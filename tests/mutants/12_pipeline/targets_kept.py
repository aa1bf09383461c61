"""The targets of all micro-batches are kept, for no reason.

task: Stage
says: is sent and let go of, a target too
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from refimpl.comm.group import Group


class Stage:
    """One stage on this rank, number group.rank of group.size, and what it does at each tick of
    a schedule.

    stage = Stage(module, group, loss, like) stage.forward(0, inputs, target);
    stage.forward(1, ...); stage.backward(0, scale); ...; stage.finish()

    `like` has the shape and dtype of every activation between stages. Between a micro-batch's
    forward and backward its input stays, and what autograd saves; the output's values do not,
    only its place in the graph:

        edge = get_gradient_edge(out)             # of torch.autograd.graph; keeps no values
        torch.autograd.backward(edge, gradient)   # as out.backward(gradient)
    """

    def __init__(
        self,
        module: nn.Module,
        group: Group,
        loss: Callable[[Tensor, Any], Tensor],
        like: Tensor,
    ) -> None:  # given
        self.module, self.group, self.loss, self.like = module, group, loss, like
        self.kept: dict[int, Any] = {}  # micro-batch -> what its backward needs
        self.sending: dict[int, Any] = {}  # neighbour -> the send to it that was begun last

    def forward(self, micro: int, inputs: Tensor | None = None, target: Any = None) -> Tensor | None:
        """Get the input from the stage before (stage 0 is given `inputs`), compute, send the
        output to the next stage.

        The last stage computes loss(output, target), and returns it, detached; the others
        return None.
        """
        group, is_last = self.group, self.group.rank == self.group.size - 1
        self.targets = [*getattr(self, "targets", []), target]
        if group.rank > 0:
            inputs = torch.empty_like(self.like)
            group.recv(inputs, group.rank - 1)
            inputs.requires_grad_()
        out = self.module(inputs)
        if is_last:
            out = self.loss(out, target)
        result = out.detach() if is_last else None
        self.kept[micro] = inputs, get_gradient_edge(out), result
        if not is_last:
            self.send(out.detach(), group.rank + 1)
        return result

    def backward(self, micro: int, scale: float) -> None:
        """Get the output's gradient from the next stage (the last one begins with `scale` times
        its loss), go backward, send the input's gradient to the stage before. Nothing of the
        micro-batch stays but the parameters' `.grad`.
        """
        inputs, edge, result = self.kept.pop(micro)
        if result is not None:
            gradient = torch.full_like(result, scale)
        else:
            gradient = torch.empty_like(self.like)
            self.group.recv(gradient, self.group.rank + 1)
        torch.autograd.backward(edge, gradient)
        if self.group.rank > 0:
            self.send(inputs.grad, self.group.rank - 1)

    def send(self, x: Tensor, to: int) -> None:
        """Begin to send x, which need not be contiguous, and return: two stages that send to
        each other must not stand.

        At most one send to each neighbour is under way: the one before is waited for first.
        """
        if to in self.sending:
            self.sending.pop(to).wait()
        self.sending[to] = self.group.send(x.contiguous(), to, async_op=True)

    def finish(self) -> None:
        """Wait for the sends under way, and let go of them.

        Called after the last tick of a step.
        """
        for work in self.sending.values():
            work.wait()
        self.sending.clear()
