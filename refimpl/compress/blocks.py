"""int8 or int4 by blocks: each block of B numbers is scaled so that its largest becomes 127 or 7, and rounded.

Wire of n numbers: n (int8) or n / 2 (int4, two a byte) bytes of codes, 4 ceil(n / B) of scales in fp32. The scales
travel, and sums are formed after dequantising: integers of different scales have no common unit. Rounding to nearest is
a contraction, b = (B - 1) / (B - 1 + 4 L^2) with L = 127 or 7: at worst all but the largest number lie half a step
from zero. `stochastic` rounding, up with the probability of the fraction, is unbiased, and
b = (sqrt(1 + (B - 1) / L^2) - 1) / 2. A block that is not finite becomes NaN as a whole, by its scale.
Alistarh et al. 2017, arXiv:1610.02132 (QSGD, where the scale is the 2-norm); Dettmers et al. 2021, arXiv:2110.02861,
section 2. DeepSpeed: csrc/quantization/swizzled_quantize.cu.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from refimpl.compress.compressor import Compressor, Layout, Wire, flat, generator

MOST = 3.4e38  # fp32 ends just above: a scale of that, rounded, times 127 would be infinite


@dataclass(frozen=True)
class Blocks(Compressor):
    """`bits` 8 or 4 a number, one scale for `block` of them; the last block may be shorter. ValueError for others."""

    bits: int = 8
    block: int = 256
    stochastic: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ValueError(f"Blocks: bits is {self.bits!r}; it must be 8 or 4")
        if not isinstance(self.block, int) or self.block < 1:
            raise ValueError(f"Blocks: block is {self.block!r}; it must be a whole number, 1 or more")

    @property
    def unbiased(self) -> bool:
        return self.stochastic

    @property
    def largest(self) -> int:
        """The code of a block's largest number."""
        return (1 << (self.bits - 1)) - 1

    def layout(self, n: int, dtype: torch.dtype) -> Layout:
        codes = (n, torch.int8) if self.bits == 8 else (-(-n // 2), torch.uint8)
        return [(-(-n // self.block), torch.float32), codes] if n else []

    def compress(self, x: Tensor, turn: int = 0) -> Wire:
        """x [n] -> scales [ceil(n / block)] fp32, codes [n] int8 or [ceil(n / 2)] uint8."""
        x = flat(x)
        if not len(x):
            return ()
        values = in_blocks(x.float(), self.block)  # [blocks, block]
        scales = values.abs().amax(1) / self.largest  # NaN stays NaN
        most = MOST / self.largest
        scales = torch.where(scales == 0, 1.0, torch.where(scales.isfinite(), scales.clamp(max=most), torch.nan))
        units = (values / scales[:, None]).nan_to_num_(0).view(-1)[: len(x)]
        units = units.add_(self._dither(units, turn)).floor_() if self.stochastic else units.round_()
        codes = units.clamp_(-self.largest, self.largest).to(torch.int8)
        return scales, codes if self.bits == 8 else pack_nibbles(codes)

    def add_to(self, total: Tensor, wire: Wire, sign: float = 1.0, turn: int = 0) -> None:
        scales, codes = wire
        numbers = codes.float() if self.bits == 8 else unpack_nibbles(codes)[: len(total)]
        for here, scale in by_scale(scales, self.block, numbers):
            here.mul_(scale)
        total.add_(numbers, alpha=sign)  # rounded twice, as whoever decompresses and adds does: no addcmul

    def error_bound(self, n: int) -> float:
        others, levels = min(self.block, n) - 1, self.largest
        if self.stochastic:
            return (math.sqrt(1 + others / levels**2) - 1) / 2
        return others / (others + 4 * levels**2)

    def _dither(self, like: Tensor, turn: int) -> Tensor:
        return torch.rand(like.shape, generator=generator(self.seed, turn, like.device), device=like.device)


def in_blocks(x: Tensor, block: int) -> Tensor:
    """[n] -> [ceil(n / block), block], with zeros at the end."""
    return torch.nn.functional.pad(x, (0, -len(x) % block)).view(-1, block)


def by_scale(scales: Tensor, block: int, *flat: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The blocks of each flat [n] as rows, views, and their scales as a column: the whole ones, then a shorter last."""
    n = len(flat[0])
    whole = n // block * block
    for here, start, end in ((scales[: whole // block], 0, whole), (scales[-1:], whole, n)):
        if start < end:
            yield *(x[start:end].view(len(here), -1) for x in flat), here[:, None]


def pack_nibbles(codes: Tensor) -> Tensor:
    """codes [n] int8, each from -8 to 7 -> [ceil(n / 2)] uint8, the first of two in the low half."""
    pairs = torch.nn.functional.pad(codes.add(8).view(torch.uint8), (0, len(codes) % 2)).view(-1, 2)
    return pairs[:, 0] | (pairs[:, 1] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """[m] uint8 -> [2 m] fp32, the inverse of `pack_nibbles`."""
    bytes_ = torch.arange(256, device=packed.device)
    table = torch.stack([bytes_ & 15, bytes_ >> 4], dim=1).float() - 8  # [256, 2]
    return table.index_select(0, packed.int()).view(-1)
