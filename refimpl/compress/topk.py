"""Top-k: the k numbers of largest magnitude and where they stand; the others are zero.

Wire of n numbers: k values in their dtype and k indices of 4 bytes (8 from 2^31 numbers on), k = ceil(ratio n): with
ratio 0.01 in fp32 50 times less than the numbers themselves. A contraction with b = 1 - k / n: no choice of k numbers
loses less. Sums of several ranks' top-k are no top-k: each rank's values and indices go to all (`Gathered`).
Stich et al. 2018, arXiv:1809.07599, definition 2.1; Lin et al. 2018, arXiv:1712.01887. DeepSpeed has none.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from refimpl.compress.compressor import Compressor, Layout, Wire, flat


@dataclass(frozen=True)
class TopK(Compressor):
    """`ratio` of the numbers, at least one. ValueError unless 0 < ratio <= 1."""

    ratio: float = 0.01

    def __post_init__(self) -> None:
        check_ratio("TopK", self.ratio)

    def layout(self, n: int, dtype: torch.dtype) -> Layout:
        k = count(self.ratio, n)
        return [(k, dtype), (k, index_dtype(n))] if n else []

    def compress(self, x: Tensor, turn: int = 0) -> Wire:
        """x [n] -> values [k] in x's dtype, indices [k] int32 in no order. What is not finite counts as largest."""
        x = flat(x)
        if not len(x):
            return ()
        _, places = torch.topk(x.abs(), count(self.ratio, len(x)), sorted=False)  # NaN is the largest of all
        return x[places], places.to(index_dtype(len(x)))

    def add_to(self, total: Tensor, wire: Wire, sign: float = 1.0, turn: int = 0) -> None:
        values, places = wire
        total.index_add_(0, places, values.to(total.dtype), alpha=sign)

    def error_bound(self, n: int) -> float:
        return 1 - count(self.ratio, n) / n if n else 0.0


def count(ratio: float, n: int) -> int:
    """ceil(ratio n), where a product such as 0.07 * 100 is 7 whatever its rounding; at least 1 of any number at all."""
    return min(n, max(1, math.ceil(ratio * n * (1 - 1e-12))))


def index_dtype(n: int) -> torch.dtype:
    return torch.int32 if n < 2**31 else torch.int64


def check_ratio(who: str, ratio: float) -> None:
    if not isinstance(ratio, float | int) or not 0 < ratio <= 1:
        raise ValueError(f"{who}: ratio is {ratio!r}; it must be above 0 and at most 1")
