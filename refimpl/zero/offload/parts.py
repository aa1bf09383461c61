"""A part: elements of a rank's slice whose weights and optimizer state rest on a disk, and come and go as one record.

    record      weights [n] | first state [n] | second state [n] | ...      each begins on a multiple of 64 bytes
    buffer      record | gradient [n]                                       the gradient if it rests on a disk too

The optimizer goes on holding the same tensors. While a part is away their memory is one NaN, seen in their shape:
whoever reads them by mistake notices, and writing to them is an error. `attach` makes them views of the buffer into
which the record was read, `detach` sends them away; state that the optimizer made or replaced in between is copied into
the buffer, in the order of its keys. A part that is cut (see `Slices`) keeps its record: its pieces are views of it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from refimpl.offload.blocks import BlockFile, Buffer, OffloadError, Record, pages
from refimpl.offload.homes import away
from refimpl.zero.flat import Bucket, round_up
from refimpl.zero.optimizer.slices import Slice, Slices
from refimpl.zero.parameter import DATA

WEIGHTS = ""  # the key under which a slice's own memory goes
Layout = list[tuple[str, torch.dtype]]


@dataclass(eq=False)
class Part:
    """Elements from `start` on of what this rank owns of `bucket`."""

    slices: Slices
    bucket: Bucket
    start: int
    weights: Tensor  # [n], fp32
    most: int  # bytes that its record may ever take
    grad_dtype: torch.dtype | None = None  # of its gradient, if that rests on a disk too
    record: Record | None = None
    beside: tuple[BlockFile, Record] | None = None  # its gradient
    gradient: Tensor | None = None  # [n], in the buffer, while it is here
    layout: Layout = field(default_factory=lambda: [(WEIGHTS, torch.float32)])

    @property
    def end(self) -> int:
        return self.start + self.weights.numel()

    @property
    def nbytes(self) -> int:
        return size_of([dtype for _, dtype in self.layout], self.weights.numel())

    @property
    def room(self) -> int:
        """Bytes of a buffer that takes it and its gradient."""
        return pages(self.most) + (pages(self.weights.numel() * self.grad_dtype.itemsize) if self.grad_dtype else 0)

    def members(self) -> list[Slice]:
        """The optimizer's slices inside."""
        return self.slices.inside(self.bucket, self.start, self.end)

    def attach(self, buffer: Buffer) -> None:
        """What the record holds is in the buffer: let the optimizer's tensors live there."""
        members = self.members()
        if self.beside is not None and self.grad_dtype is not None:
            size = self.weights.numel() * self.grad_dtype.itemsize
            self.gradient = buffer.bytes[pages(self.most) :][:size].view(self.grad_dtype)
        for key, flat in self._flats(buffer):
            if key == WEIGHTS:
                self.weights = flat
            for s in members:
                tensor = self.slices.tensors(s).get(key)
                if tensor is not None:
                    DATA.__set__(tensor, self._inside(flat, s).view(tensor.shape))

    def detach(self, buffer: Buffer) -> None:
        """Have all of it in the buffer, and nothing in memory of its own."""
        members = self.members()
        held = {key: t.dtype for s in members for key, t in self.slices.tensors(s).items()}
        known = [(key, dtype) for key, dtype in self.layout if key in held]
        self.layout = known + [(key, held[key]) for key in sorted(held.keys() - dict(known).keys())]
        if self.nbytes > self.most:
            raise OffloadError(
                f"the optimizer has made state, {', '.join(sorted(held.keys() - {WEIGHTS}))}, for which no room was "
                "taken on the disk: set the option that asks for it (momentum, amsgrad) before the stage is built"
            )
        for key, flat in self._flats(buffer):
            for s in members:
                tensor = self.slices.tensors(s).get(key)
                if tensor is not None:
                    here, there = DATA.__get__(tensor).view(-1), self._inside(flat, s)
                    if here.data_ptr() != there.data_ptr():
                        there.copy_(here)
                    DATA.__set__(tensor, away(tensor))
        self.weights, self.gradient = away(self.weights), None

    def _inside(self, flat: Tensor, s: Slice) -> Tensor:
        return flat[s.start - self.start : s.end - self.start]

    def _flats(self, buffer: Buffer) -> Iterator[tuple[str, Tensor]]:
        at = 0
        for key, dtype in self.layout:
            size = self.weights.numel() * dtype.itemsize
            yield key, buffer.bytes[at : at + size].view(dtype)
            at = round_up(at + size, 64)


def size_of(dtypes: Sequence[torch.dtype], numel: int) -> int:
    """Bytes of a record."""
    return sum(round_up(numel * dtype.itemsize, 64) for dtype in dtypes)
