"""Error feedback: what was not sent is added to what is sent next.

    y = x + error      wire = C(y)      error = y - C(y)

Nothing is lost, only late: after any number of calls the sum of what was sent is the sum of the x minus one error. That
makes SGD with a contraction converge as fast as without (Karimireddy et al. 2019, arXiv:1901.09847, algorithm 2).
Memory: 4 bytes an element for the error, and 4 more for the one before it, which is the error again when nobody has
used what was sent: a step that is skipped.
"""

import torch
from torch import Tensor

from refimpl.compress.compressor import Compressor, Wire


class ErrorFeedback:
    """Compresses one tensor [n] call after call, with what the calls before have lost."""

    def __init__(self, compressor: Compressor, n: int, device: torch.device | None = None) -> None:
        bound = compressor.error_bound(n)
        if bound >= 1:
            raise ValueError(
                f"{compressor}: of {n} numbers it may lose {bound:.3g} times their square, and error feedback would "
                "add that up: it needs less than 1. Use it without feedback, if it is unbiased, or in smaller blocks"
            )
        self.compressor, self.n = compressor, n
        self.error = torch.zeros(n, device=device)  # [n] fp32
        self._before: Tensor | None = None  # the error that counts until `accept`, if there was a call
        self._spare: Tensor | None = None

    def compress(self, x: Tensor, turn: int = 0, dtype: torch.dtype | None = None) -> Wire:
        """x [n], floating -> the wire of x and the error, of values in `dtype`: fp32 by default. Keeps what is lost."""
        y = self.corrected(x)
        wire = self.compressor.compress(y if dtype is None else y.to(dtype), turn)
        if self.n:
            self.compressor.add_to(y, wire, -1.0, turn)
        self.keep(y)
        return wire

    def corrected(self, x: Tensor) -> Tensor:
        """x [n], floating -> x and what was lost before, [n] fp32, in memory that is `keep`'s next argument."""
        if x.shape != (self.n,):
            raise ValueError(f"error feedback of [{self.n}]: x has shape {list(x.shape)}")
        y = torch.empty_like(self.error) if self._spare is None else self._spare
        self._spare = None
        return torch.add(self.error, x.detach(), out=y)

    def keep(self, lost: Tensor) -> None:
        """What was lost of `corrected` is the error from now on."""
        if self._before is None:
            self._before = self.error
        else:
            self._spare = self.error
        self.error = lost

    def accept(self) -> None:
        """What was sent since the last `accept` has been used."""
        if self._before is not None:
            self._spare, self._before = self._before, None

    def revert(self, start: int = 0, end: int | None = None) -> None:
        """Nobody will use elements start to end of what was sent since the last `accept`: their error is as it was."""
        if self._before is not None:
            self.error[start:end] = self._before[start:end]

    def rescale(self, factor: float) -> None:
        """The numbers are measured in another unit from now on, such as another loss scale."""
        for error in (self.error, self._before):
            if error is not None:
                error.mul_(factor)

    def accepted(self) -> Tensor:
        """The error as of the last `accept`. [n]"""
        return self.error if self._before is None else self._before

    def tensors(self) -> list[Tensor]:
        """The memory that this keeps."""
        return [t for t in (self.error, self._before, self._spare) if t is not None]
