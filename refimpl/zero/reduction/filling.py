"""A bucket that fills: this rank's own gradients, added into one flat buffer [P] as they arrive.

Small gradients are kept as they come and copied together when somebody wants the buffer: one call a bucket instead of
one a parameter (torch's DDP: `batched_grad_copy`). On CUDA, where each call is a launch, all are. On a CPU a large one
is copied while it is still in cache, and its memory is free again. What never arrives counts as zero.

A model may compute some layers on a stream of their own; autograd then hands over their gradients on that. A bucket is
filled on the stream on which its buffer was taken. A gradient of another one is copied on its own, before its memory
can go back there: each waits for the other.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from refimpl.comm.collectives import Scratch
from refimpl.zero.flat import Bucket

SMALL = 1 << 14  # elements: 64 KB of fp32


class Filling:
    """Of one bucket, from its first gradient until the whole of it is reduced."""

    def __init__(self, bucket: Bucket, scratch: Scratch, dtype: torch.dtype | None) -> None:
        """`scratch` lends the buffer. `dtype`: in which gradients add up, the bucket's by default."""
        self.bucket, self.streams = bucket, scratch.streams
        self.stream = self.streams.current()
        self.buffer = scratch.take(bucket.padded, torch.empty(0, dtype=dtype or bucket.dtype, device=bucket.device))
        self.arrived: set[nn.Parameter] = set()
        self.kept: dict[nn.Parameter, Tensor] = {}  # of what arrived, what is not in the buffer yet
        self.buffer.index_fill_(0, bucket.padding, 0)

    def add(self, p: nn.Parameter, grad: Tensor) -> None:
        """Add a gradient of p, without a graph."""
        elsewhere = self.streams.current() != self.stream
        if elsewhere or p in self.arrived:
            self.copy_kept()
        if p in self.arrived:
            self.bucket.piece(self.buffer, p).add_(grad)
        elif elsewhere or (grad.numel() >= SMALL and not grad.is_cuda):
            self.bucket.piece(self.buffer, p).copy_(grad)
        else:
            self.kept[p] = grad
        self.arrived.add(p)
        if elsewhere:
            self.streams.followed_by(self.stream)

    @contextmanager
    def at_home(self) -> Iterator[None]:
        """The block's kernels go to the stream that fills the buffer, and the caller's waits for it."""
        caller = self.streams.current()
        with self.streams.use(self.stream):
            yield
            self.streams.followed_by(caller)

    def copy_kept(self) -> None:
        """Copy what was kept into the buffer, which the caller's stream may use from then on."""
        with self.at_home():
            if self.kept:
                place_of = dict(zip(self.bucket.params, self.bucket.pieces(self.buffer), strict=True))
                torch._foreach_copy_([place_of[p] for p in self.kept], list(self.kept.values()))
                self.kept = {}

    def of(self, p: nn.Parameter) -> Tensor | None:
        """The gradient of p so far, a view in p's shape."""
        self.copy_kept()
        return self.bucket.piece(self.buffer, p) if p in self.arrived else None

    def discard(self, p: nn.Parameter) -> None:
        """Forget the gradient of p."""
        self.arrived.discard(p)
        self.kept.pop(p, None)

    def complete(self) -> Tensor:
        """The buffer [P], zero where nothing arrived."""
        self.copy_kept()
        for p in self.bucket.params if len(self.arrived) < len(self.bucket.params) else ():
            if p not in self.arrived:
                self.bucket.piece(self.buffer, p).zero_()
        return self.buffer
