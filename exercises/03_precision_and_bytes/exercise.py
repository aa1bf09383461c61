"""Chapter 03, precision and bytes: train in 16 bits without losing the small numbers, and know
what every byte is for.

`group` is a refimpl Group: group.all_reduce(x, "sum" | "mean" | "max") replaces x by the result
on every rank. Strategies are called "ddp", "zero1", "zero2" and "zero3". Psi is the number of
parameters, N the number of ranks.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn, optim

from refimpl.comm.group import Group


def sum_in_fp32(rows: Tensor) -> Tensor:
    """rows [N, n] in bf16 or fp16, one row a rank -> [n] in rows' dtype: the sum in row order,
    rounded once.

    Example in bf16: 256 + 1 + 1 is 258; added in bf16, each 256 + 1 would be rounded back to
    256.
    """
    raise NotImplementedError("sum_in_fp32")


def overflowed(group: Group, grads: Sequence[Tensor]) -> bool:
    """Whether any gradient on any rank holds Inf or NaN: the same answer on all ranks, so that
    all skip the step.

    `grads` may be empty on some ranks. One all-reduce of one number.
    """
    raise NotImplementedError("overflowed")


def unscale_and_clip(
    grads: Sequence[Tensor], scale: float, limit: float
) -> tuple[list[Tensor], float]:
    """fp16 or bf16 gradients of (loss x scale) -> fp32 gradients of the loss, clipped; and
    their norm before clipping.

    The norm is the L2 norm of all gradients together, unscaled. When it exceeds `limit`, every
    gradient is multiplied by limit / norm. `grads` keep their values. fp16 ends at 65504:
    neither squares nor unscaled values fit into it. bf16 goes to 3e38, and there squares do not
    fit into fp32 either. Gradients that are all zero have norm 0.
    """
    raise NotImplementedError("unscale_and_clip")


class DynamicLossScaler:
    """Finds the largest loss scale at which fp16 gradients do not overflow.

    The scale doubles on the good step that follows `window` good ones in a row, and again after
    every `window` more. The first `hysteresis` - 1 overflows are endured; every one after them
    halves the scale, until a doubling allows `hysteresis` - 1 again. The scale begins as a
    power of two, at least 1, and stays a power of two. Where it would halve a scale of 1 it
    raises OverflowError: the loss itself is not finite.
    """

    def __init__(self, scale: float = 2**16, window: int = 1000, hysteresis: int = 2):  # given
        self.scale, self.window, self.hysteresis = scale, window, hysteresis
        self.left = hysteresis  # the overflow that finds 1 left halves the scale
        self.good_steps = 0  # since the last overflow

    def update(self, overflow: bool) -> None:
        """Tell the scaler how the step went. OverflowError if the scale should go below 1."""
        raise NotImplementedError("DynamicLossScaler.update")


class MasterWeights:
    """An fp32 copy of 16-bit parameters that the optimizer updates, so that small updates are
    not rounded away.

    Memory: 4 bytes a parameter for the masters and 8 for Adam's state, all fp32; nothing else
    is kept. The parameters keep their memory: others may hold views of it.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        make_optimizer: Callable[[list[nn.Parameter]], optim.Optimizer],
    ) -> None:
        """Make self.masters, fp32 parameters like `params`, and
        self.optimizer = make_optimizer(self.masters).
        """
        raise NotImplementedError("MasterWeights.__init__")

    @torch.no_grad()
    def step(self, grads: Sequence[Tensor]) -> None:
        """Update the masters with `grads` (fp32), round them into the parameters, and keep no
        gradient alive.
        """
        raise NotImplementedError("MasterWeights.step")


def memory_bytes(strategy: str, params: int, ranks: int, itemsize: int) -> dict[str, int]:
    """Bytes on each rank between backward and step with AdamW, by class; `params` is a multiple
    of `ranks`.

    itemsize: bytes of the model's dtype, 4 (fp32: no masters) or 2 (bf16: fp32 masters).
    Gradients have the model's dtype; AdamW keeps two fp32 numbers a parameter. ZeRO-1 shards
    what the optimizer owns, ZeRO-2 the gradients too, ZeRO-3 the parameters too. Keys:
    "parameters", "gradients", "optimizer", "master weights".
    """
    raise NotImplementedError("memory_bytes")


def sent_bytes(
    strategy: str, params: int, ranks: int, itemsize: int, micro_batches: int
) -> dict[str, int]:
    """Bytes each rank sends in a step of several micro-batches, by purpose; `params` is a
    multiple of `ranks`.

    Keys: "gradients", "parameters". DDP and ZeRO-1 send gradients once a step; ZeRO-2 and 3
    with every micro-batch. ZeRO-1 and 2 gather the updated parameters once a step; ZeRO-3
    before each forward and each backward. DDP all-reduces; the others reduce-scatter and
    all-gather. Each element has `itemsize` bytes on the wire.
    """
    raise NotImplementedError("sent_bytes")
