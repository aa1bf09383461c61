"""One bit a number: its sign, with the mean magnitude of all as the scale.

    C(x) = mean|x| sign(x),  sign(0) = 1        |C(x) - x|^2 = |x|^2 - |x|_1^2 / n

Wire of n numbers: ceil(n / 8) bytes of signs, 4 of scale: 32 times less than fp32. A contraction with b = 1 - 1 / n at
worst (one number, the others zero), and near 1 - 2 / pi for normal numbers. Without error feedback it does not converge
in general. Seide et al. 2014, "1-bit stochastic gradient descent"; Bernstein et al. 2018, arXiv:1802.04434;
Karimireddy et al. 2019, arXiv:1901.09847, section 4. DeepSpeed until 0.19.6: deepspeed/runtime/comm/compressed.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from refimpl.compress.compressor import Compressor, Layout, Wire, flat

# Times eight bytes of 0 or 1 read as one integer: its highest byte has the eight bits.
GATHER = 0x0102040810204080


@dataclass(frozen=True)
class Sign(Compressor):
    """The sign of each number, and one scale for all."""

    def layout(self, n: int, dtype: torch.dtype) -> Layout:
        return [(1, torch.float32), (-(-n // 8), torch.uint8)] if n else []

    def compress(self, x: Tensor, turn: int = 0) -> Wire:
        """x [n] -> scale [1] fp32, signs [ceil(n / 8)] uint8: bit i of byte j is set if number 8 j + i is not below 0.

        The scale is not finite if x is not.
        """
        x = flat(x)
        if not len(x):
            return ()
        return x.abs().mean(dtype=torch.float32).view(1), pack_bits(x >= 0)

    def add_to(self, total: Tensor, wire: Wire, sign: float = 1.0, turn: int = 0) -> None:
        scale, bits = wire
        total.add_(unpack_bits(bits, scale)[: len(total)], alpha=sign)

    def error_bound(self, n: int) -> float:
        return 1 - 1 / n if n else 0.0


def pack_bits(bits: Tensor) -> Tensor:
    """[n] bool -> [ceil(n / 8)] uint8, the first of eight in the lowest bit."""
    eights = torch.nn.functional.pad(bits.view(torch.uint8), (0, -len(bits) % 8)).view(torch.int64)
    return ((eights * GATHER) >> 56).to(torch.uint8)


def unpack_bits(packed: Tensor, scale: Tensor) -> Tensor:
    """[m] uint8, scale [1] -> [8 m], scale where the bit is set and -scale elsewhere."""
    bytes_ = torch.arange(256, device=packed.device)
    signs = ((bytes_[:, None] >> torch.arange(8, device=packed.device)) & 1) * 2 - 1  # [256, 8]
    return (signs * scale).index_select(0, packed.int()).view(-1)
