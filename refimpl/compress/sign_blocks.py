"""One bit a number, and a scale for each block of B: `Sign`, of each block alone.

    C(x) = mean|block| sign(x),  sign(0) = 1

Wire of n numbers: ceil(n / 8) bytes of signs, 2 ceil(n / B) of scales in bf16, whose rounding is fed back with the
rest. One scale for layers whose numbers are of different sizes is noise in the small ones; blocks end that at 16 / B
bits a number. A contraction with b just above 1 - 1 / B at worst. Dettmers et al. 2021, arXiv:2110.02861, section 2,
has the blocks; Seide et al. 2014 a scale a column.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from refimpl.compress.blocks import by_scale, in_blocks
from refimpl.compress.compressor import Compressor, Layout, Wire, flat
from refimpl.compress.sign import pack_bits, unpack_bits


@dataclass(frozen=True)
class SignBlocks(Compressor):
    """`block` numbers share a scale, the last ones fewer. ValueError for less than 1."""

    block: int = 128

    def __post_init__(self) -> None:
        if not isinstance(self.block, int) or self.block < 1:
            raise ValueError(f"SignBlocks: block is {self.block!r}; it must be a whole number, 1 or more")

    def layout(self, n: int, dtype: torch.dtype) -> Layout:
        return [(-(-n // self.block), torch.bfloat16), (-(-n // 8), torch.uint8)] if n else []

    def compress(self, x: Tensor, turn: int = 0) -> Wire:
        """x [n] -> scales [ceil(n / block)] bf16, signs [ceil(n / 8)] uint8, as `Sign`'s."""
        x = flat(x)
        if not len(x):
            return ()
        sums = in_blocks(x.float().abs(), self.block).sum(1)  # [blocks]
        counts = torch.full_like(sums, self.block)
        counts[-1:].fill_(len(x) - self.block * (len(sums) - 1))  # `counts[-1] =` copies from the host, on a GPU
        return (sums / counts).bfloat16(), pack_bits(x >= 0)

    def add_to(self, total: Tensor, wire: Wire, sign: float = 1.0, turn: int = 0) -> None:
        scales, bits = wire[0].float(), wire[1]
        signs = unpack_bits(bits, torch.ones(1, device=bits.device))[: len(total)]
        for here, its, scale in by_scale(scales, self.block, total, signs):
            here.addcmul_(its, scale, value=sign)

    def error_bound(self, n: int) -> float:
        return 1 - (1 - 2**-16) / min(self.block, n) if n else 0.0  # a scale is off by 2^-9 of it at most
