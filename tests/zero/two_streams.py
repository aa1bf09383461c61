"""A model that computes some of its layers on a stream of its own, as autograd runs it on a GPU; streams on paper.

A GPU's autograd runs each node, with its hooks, on the stream of its forward, has it wait for the streams of the nodes
that it gets gradients from, and the caller's stream for all in the end (torch/csrc/autograd/engine.cpp). A CPU's knows
nothing of streams: here hooks of the nodes say it to the recorder.
"""

from collections.abc import Iterator
from typing import Any

import torch
from stream_log import COMPUTE, Recorder
from torch import Tensor, nn


class Aside(nn.Module):
    """`layer`, computed on `stream` while others use the caller's."""

    def __init__(self, layer: nn.Module, recorder: Recorder, stream: int) -> None:
        super().__init__()
        self.layer, self.recorder, self.stream = layer, recorder, stream
        self.crossed: list[Tensor] = []  # between streams: whoever does it calls `record_stream`, autograd too

    def forward(self, x: Tensor) -> Tensor:
        """On no account use it before `join`."""
        self.recorder.followed_by(self.stream)
        with self.recorder.use(self.stream):
            first = x.view_as(x)
            y = self.layer(first)
        self.crossed += [x, y]
        for node in nodes(y.grad_fn, first.grad_fn):
            node.register_prehook(self._begin)
            node.register_hook(self._end if node.next_functions else self._end_of_leaf)
        return y

    def join(self) -> None:
        """The caller's stream waits for the layer's."""
        caller = self.recorder.current()
        with self.recorder.use(self.stream):
            self.recorder.followed_by(caller)

    def _begin(self, grads: tuple[Tensor, ...]) -> None:
        if self.recorder.current() != self.stream:
            self.recorder.followed_by(self.stream)
        self.crossed += grads
        self.recorder.stack.append(self.stream)

    def _end(self, results: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> None:
        self.crossed += results
        self.recorder.followed_by(COMPUTE)
        self.recorder.stack.pop()

    def _end_of_leaf(self, *_: Any) -> None:
        event = self.recorder.record()
        self.recorder.stack.pop()
        torch.autograd.Variable._execution_engine.queue_callback(lambda: self.recorder.wait(event))


def nodes(last: Any, first: Any) -> Iterator[Any]:
    """The graph's nodes from `last` back to `first`, those that accumulate gradients among them."""
    seen, todo = set(), [last]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            todo += [] if node is first else [before for before, _ in node.next_functions]
