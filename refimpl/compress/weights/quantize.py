"""Weights and inputs that are rounded in forward: a model learns to live with what it will be stored and fed as.

Quantisation-aware training (Jacob et al. 2018, arXiv:1712.05877): the optimizer moves the numbers in full, forward
sees them on the grid of `refimpl.compress.weights.grid`. `Quantize` may begin with more bits than it ends with: one
fewer after `period` steps, the next after twice as many, and so on (DeepSpeed's MoQ), and may mix the rounded numbers
in little by little. DeepSpeed's MoQ rounds the 16-bit weights after each step instead, which is the same forward.
DeepSpeed until 0.19.6: deepspeed/compression/basic_layer.py, deepspeed/runtime/quantize.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from refimpl.compress.compressor import generator
from refimpl.compress.weights.grid import in_range, on_grid

RANGE = "activation_quantizer"  # DeepSpeed's name of a layer's module that has seen the range of its inputs
MOMENTUM = 0.95  # of that range


@dataclass(frozen=True)
class Quantize:
    """Round a weight from step `offset` on: `start_bits` at first, in the end `bits`. An embedding's groups: rows."""

    offset: int
    bits: int
    start_bits: int
    period: int = 1
    symmetric: bool = True
    groups: int = 1
    stochastic: bool = False
    ratio: float | None = None  # the share of the unrounded number falls by this a step, from 1 at every change of bits
    number: int = 0  # of the layer, for what is random

    def now(self, steps: int) -> tuple[int, int]:
        """(bits, steps since they changed) after so many steps of rounding."""
        bits, period, since = self.start_bits, self.period, 0
        while bits > self.bits and steps >= period:
            bits, since, period = bits - 1, period, max(2 * period, period + 1)
        return bits, steps - since

    def at(self, step: int) -> "Rounding":
        """What is done in this step of training."""
        bits, since = self.now(step - self.offset)
        share = 0.0 if self.ratio is None else max(0.0, 1 - self.ratio * (since + 1))
        return Rounding(bits, self.symmetric, self.groups, share, (self.number, step) if self.stochastic else None)

    def at_last(self, weight: Tensor) -> Tensor:
        """The weight on the grid of its last bits, to nearest: what is kept of it."""
        return on_grid(weight, self.bits, self.symmetric, self.groups)


@dataclass(frozen=True)
class Rounding:
    """A weight's in one step."""

    bits: int
    symmetric: bool
    groups: int
    share: float  # of the unrounded number
    draw: tuple[int, int] | None  # what is random, the same on every rank

    def __call__(self, weight: Tensor) -> Tensor:
        """The weight as forward sees it, straight through."""
        noise = None
        if self.draw is not None:
            random = generator(*self.draw, weight.device)
            noise = torch.rand(weight.shape, generator=random, device=weight.device, dtype=weight.dtype) - 0.5
        there = on_grid(weight, self.bits, self.symmetric, self.groups, noise)
        return there if self.share == 0 else weight * self.share + there * (1 - self.share)


@dataclass(frozen=True)
class QuantizeInput:
    """Round a layer's input from step `offset` on: by a range for each token (of an image: each image), or one seen."""

    offset: int
    bits: int
    symmetric: bool = True
    static: bool = False

    def at(self, step: int) -> "QuantizeInput":
        return self

    def prepare(self, layer: nn.Module) -> None:
        if self.static:
            setattr(layer, RANGE, SeenRange())

    def rounded(self, layer: nn.Module, x: Tensor) -> Tensor:
        """x [..., in] of a Linear, [images, channels, height, width] of a Conv2d."""
        if self.static:
            low, high = getattr(layer, RANGE)(x)
            return in_range(x, self.bits, self.symmetric, low, high)
        each = x.shape[0] if isinstance(layer, nn.Conv2d) and x.ndim == 4 else x[..., 0].numel()
        return on_grid(x, self.bits, self.symmetric, 1 if isinstance(layer, nn.Conv2d) and x.ndim == 3 else each)


class SeenRange(nn.Module):
    """Least and largest input so far, the older the less they count: a buffer of each rank, as BatchNorm's are."""

    x_min_max: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("x_min_max", torch.zeros(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(least, largest), scalars of x's dtype, with those of x in training."""
        again = torch._C._current_graph_task_id() != -1  # in backward: what a checkpoint computes for the second time
        if self.training and x.numel() and not again:
            with torch.no_grad():
                seen = torch.stack([x.min(), x.max()]).to(self.x_min_max.dtype)
                before = torch.where(self.x_min_max[0] == self.x_min_max[1], seen, self.x_min_max)
                self.x_min_max.copy_(before * MOMENTUM + seen * (1 - MOMENTUM))
        low, high = self.x_min_max.to(x.dtype)
        return low, high
