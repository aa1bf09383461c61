"""Random-k: k numbers at places that all ranks draw alike, so that only values travel, and can be added on their way.

Wire of n numbers: k values in their dtype, k = ceil(ratio n), and no index: the places are a function of (seed, turn).
As it stands it is a contraction on average, b = 1 - k / n. `unbiased` multiplies by n / k, which makes the mean over
all draws x, and b = n / k - 1: for use without error feedback. Since all ranks take the same places, the sum of their
wires is the wire of their sum: an ordinary all-reduce (`Summed`).
Stich et al. 2018, arXiv:1809.07599, definition 2.1; Vogels et al. 2019, arXiv:1905.13727, section 5.1. DeepSpeed has
none.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from refimpl.compress.compressor import Compressor, Layout, Wire, flat, generator
from refimpl.compress.topk import check_ratio, count


@dataclass(frozen=True)
class RandomK(Compressor):
    """`ratio` of the numbers, at least one. ValueError unless 0 < ratio <= 1."""

    ratio: float = 0.01
    seed: int = 0
    rescaled: bool = False  # by n / k: unbiased, for use without error feedback

    def __post_init__(self) -> None:
        check_ratio("RandomK", self.ratio)

    @property
    def unbiased(self) -> bool:
        return self.rescaled

    @property
    def linear(self) -> bool:
        return True

    def layout(self, n: int, dtype: torch.dtype) -> Layout:
        return [(count(self.ratio, n), dtype)] if n else []

    def compress(self, x: Tensor, turn: int = 0) -> Wire:
        """x [n] -> values [k] in x's dtype; all NaN if x is not finite, which other places would not show."""
        x = flat(x)
        if not len(x):
            return ()
        return (x[self.places(len(x), turn, x.device)] + (x * 0).sum(),)

    def add_to(self, total: Tensor, wire: Wire, sign: float = 1.0, turn: int = 0) -> None:
        n, (values,) = len(total), wire
        values = values.to(total.dtype) * (n / len(values)) if self.rescaled else values.to(total.dtype)
        total.index_add_(0, self.places(n, turn, total.device), values, alpha=sign)

    def error_bound(self, n: int) -> float:
        k = count(self.ratio, n)
        return (n / k - 1 if self.rescaled else 1 - k / n) if n else 0.0

    def places(self, n: int, turn: int, device: torch.device) -> Tensor:
        """Which of n numbers travel in this turn, the same on every rank: [k] int64."""
        return self._drawn(n, turn, device)

    def __getstate__(self) -> dict[str, Any]:
        """Without the draws that are remembered: a configuration is sent to ranks, and copied."""
        return {name: value for name, value in vars(self).items() if name != "_drawn"}

    @cached_property
    def _drawn(self) -> Callable[[int, int, torch.device], Tensor]:
        """Remembers the last draws, of which each is asked for three times: to send, to feed back, to receive."""

        @lru_cache(maxsize=4)
        def draw(n: int, turn: int, device: torch.device) -> Tensor:
            drawn = torch.randperm(n, generator=generator(self.seed, turn, device), device=device)
            return drawn[: count(self.ratio, n)].clone()

        return draw
