"""LoCo: what qgZ's rounding loses comes back as a moving average, which itself rests in int8.

    v = x + e        wire = Q4(v)        e <- Q8(beta e + (1 - beta) (v - Q4(v)))        for each hop

With beta = 0 this is error feedback as everywhere; the average smooths errors that low precision makes noisy. Every
`reset_T` steps e is dropped, for it is of gradients at weights that have moved on. A skipped step drops it too (its
gradients were not finite), and when the loss scale changes, e changes with it, being an error of scaled gradients.
Memory: 1 + 4/256 bytes a parameter for the first hop, that divided by P for the second.
Xie et al. 2024, arXiv:2407.04480. DeepSpeed: `all_to_all_loco_quant_reduce`, which counts tensors where it says steps.
"""

import torch
from torch import Tensor

from refimpl.compress.blocks import Blocks
from refimpl.compress.compressor import Compressor, Wire
from refimpl.zero.config import LoCo
from refimpl.zero.flat import Bucket


class MovingErrors:
    """The errors of all buckets and hops, of each of the rows that this rank sends."""

    def __init__(self, compressor: Compressor, options: LoCo) -> None:
        self.compressor, self.options = compressor, options
        self.rest = Blocks(bits=8)
        self.kept: dict[tuple[Bucket, str], list[Wire]] = {}
        self.steps = 0

    def compress(self, hop: tuple[Bucket, str], rows: Tensor) -> list[Wire]:
        """rows [G, m] -> the wires of these and the errors so far; keeps the new errors."""
        value = rows.to(torch.float32, copy=True)
        error = torch.zeros_like(value)
        for row, kept in zip(error, self.kept.get(hop, []), strict=False):
            self.rest.add_to(row, kept)
        wires = [self.compressor.compress(row) for row in value.add_(error)]
        for row, wire in zip(value, wires, strict=True):
            self.compressor.add_to(row, wire, -1.0)  # what is lost
        beta = self.options.err_beta
        self.kept[hop] = [self.rest.compress(row) for row in error.mul_(beta).add_(value, alpha=1 - beta)]
        return wires

    def after_step(self, done: bool, factor: float) -> None:
        """A step is over; `factor`: the loss scale from now on, as a multiple of the one before."""
        self.steps += 1
        if not done or self.steps % self.options.reset_T == 0:
            self.kept.clear()
        elif factor != 1:
            for scales, _ in self.wires():
                scales.mul_(factor)

    def wires(self) -> list[Wire]:
        """All errors at rest."""
        return [wire for wires in self.kept.values() for wire in wires]

    def tensors(self) -> list[Tensor]:
        """Their memory."""
        return [part for wire in self.wires() for part in wire]
