"""A compressor: an operator C that turns a flat tensor x [n] into fewer bytes, its wire, and back into C(x) [n].

What C loses is bounded by one number, `error_bound`: E|C(x) - x|^2 <= b |x|^2 for every x. With b < 1 it is a
contraction (1 - b is the delta of Karimireddy et al. 2019, arXiv:1901.09847, assumption A): error feedback then makes
up for all that is lost. An operator that is `unbiased`, E C(x) = x, does without feedback, and its b may exceed 1.

    wire        a tuple of flat tensors; `layout` tells their lengths and dtypes beforehand
    wire_bytes  exactly their bytes: the layout's
    turn        which draw it is, for operators that draw at random; the others ignore it

x that is not finite must not look finite after C: all ranks then skip the step. A finite x stays finite in blocks and
in top-k; in the others where the sums and products that they form of it do so in fp32.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

Wire = tuple[Tensor, ...]
Layout = list[tuple[int, torch.dtype]]


class Compressor(ABC):
    """Keeps no state: what is random is drawn from (seed, turn)."""

    @property
    def unbiased(self) -> bool:
        """Whether the mean of C(x) over all draws is x."""
        return False

    @property
    def linear(self) -> bool:
        """Whether the sum of the ranks' wires of one turn is the wire of their sum."""
        return False

    @abstractmethod
    def layout(self, n: int, dtype: torch.dtype) -> Layout:
        """Length and dtype of each tensor of the wire of an x [n] of this dtype; nothing of an empty one."""

    @abstractmethod
    def compress(self, x: Tensor, turn: int = 0) -> Wire:
        """x [n], floating -> its wire. x is not changed."""

    @abstractmethod
    def add_to(self, total: Tensor, wire: Wire, sign: float = 1.0, turn: int = 0) -> None:
        """total [n] fp32 += sign * C(x), x [n] being what `wire` was made of in this turn."""

    @abstractmethod
    def error_bound(self, n: int) -> float:
        """The least known b with E|C(x) - x|^2 <= b |x|^2 for every x [n]."""

    def decompress(self, wire: Wire, n: int, dtype: torch.dtype = torch.float32, turn: int = 0) -> Tensor:
        """The wire of an x [n] -> C(x) [n] in `dtype`."""
        total = torch.zeros(n, device=wire[0].device if wire else None)
        if n:
            self.add_to(total, wire, turn=turn)
        return total.to(dtype)

    def wire_bytes(self, n: int, dtype: torch.dtype = torch.float32) -> int:
        """Bytes of the wire of an x [n] of this dtype."""
        return sum(length * kind.itemsize for length, kind in self.layout(n, dtype))


def flat(x: Tensor) -> Tensor:
    """x as compressors take it. TypeError if it is not floating, ValueError if it is not flat."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"compress: x is {kind}; it must be a floating tensor")
    if x.ndim != 1:
        raise ValueError(f"compress: x has shape {tuple(x.shape)}; it must be flat: x.view(-1)")
    return x.detach()


def generator(seed: int, turn: int, device: torch.device) -> torch.Generator:
    """Random numbers of one draw: the same for the same (seed, turn), on devices of one kind."""
    return torch.Generator(device).manual_seed(hash((seed, turn)) & (2**63 - 1))


def pack(wire: Wire, device: torch.device) -> Tensor:
    """A wire as one message, uint8. `device`: of one that has no parts."""
    parts = [part.contiguous().view(torch.uint8) for part in wire]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=device)


def unpack(message: Tensor, layout: Layout) -> Wire:
    """The inverse of `pack`: views of the message where they are aligned."""
    wire, at = [], 0
    for length, dtype in layout:
        piece = message[at : at + length * dtype.itemsize]
        aligned = piece.storage_offset() % dtype.itemsize == 0
        wire.append((piece if aligned else piece.clone()).view(dtype))
        at += length * dtype.itemsize
    return tuple(wire)
