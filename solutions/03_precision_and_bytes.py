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
    total = rows[0].float()
    for row in rows[1:]:
        total += row
    return total.to(rows.dtype)


def overflowed(group: Group, grads: Sequence[Tensor]) -> bool:
    """Whether any gradient on any rank holds Inf or NaN: the same answer on all ranks, so that
    all skip the step.

    `grads` may be empty on some ranks. One all-reduce of one number.
    """
    bad = any(not bool(torch.isfinite(g).all()) for g in grads)
    flag = torch.tensor([float(bad)])
    group.all_reduce(flag, "max")
    return bool(flag)


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
    unscaled = [g.float() / scale for g in grads]
    norm = torch.stack([g.double().pow(2).sum() for g in unscaled]).sum().sqrt().item()
    if norm > limit:
        for g in unscaled:
            g.mul_(limit / norm)
    return unscaled, norm


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
        if overflow:
            self.good_steps = 0
            if self.left > 1:
                self.left -= 1
            elif self.scale <= 1:
                raise OverflowError("gradients overflow at loss scale 1")
            else:
                self.scale /= 2
            return
        if self.good_steps and self.good_steps % self.window == 0:
            self.scale *= 2
            self.left = self.hysteresis
        self.good_steps += 1


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
        self.params = list(params)
        self.masters = [nn.Parameter(p.detach().float()) for p in self.params]
        self.optimizer = make_optimizer(self.masters)

    @torch.no_grad()
    def step(self, grads: Sequence[Tensor]) -> None:
        """Update the masters with `grads` (fp32), round them into the parameters, and keep no
        gradient alive.
        """
        for master, grad in zip(self.masters, grads, strict=True):
            master.grad = grad
        self.optimizer.step()
        for p, master in zip(self.params, self.masters, strict=True):
            p.copy_(master)
            master.grad = p.grad = None


def memory_bytes(strategy: str, params: int, ranks: int, itemsize: int) -> dict[str, int]:
    """Bytes on each rank between backward and step with AdamW, by class; `params` is a multiple
    of `ranks`.

    itemsize: bytes of the model's dtype, 4 (fp32: no masters) or 2 (bf16: fp32 masters).
    Gradients have the model's dtype; AdamW keeps two fp32 numbers a parameter. ZeRO-1 shards
    what the optimizer owns, ZeRO-2 the gradients too, ZeRO-3 the parameters too. Keys:
    "parameters", "gradients", "optimizer", "master weights".
    """
    shard = params // ranks
    owned = params if strategy == "ddp" else shard
    return {
        "parameters": itemsize * (shard if strategy == "zero3" else params),
        "gradients": itemsize * (shard if strategy in ("zero2", "zero3") else params),
        "optimizer": 8 * owned,
        "master weights": 4 * owned if itemsize < 4 else 0,
    }


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
    once = params * itemsize * (ranks - 1) // ranks  # a reduce-scatter, or an all-gather
    gradients = {"ddp": 2, "zero1": 1, "zero2": micro_batches, "zero3": micro_batches}
    parameters = {"ddp": 0, "zero1": 1, "zero2": 1, "zero3": 2 * micro_batches}
    return {"gradients": gradients[strategy] * once, "parameters": parameters[strategy] * once}


HINTS = {
    "sum_in_fp32": [
        "bf16 keeps 8 bits of a number: at 256 the next one is 258. Where is the sum kept while it grows?",
        "Begin with rows[0].float(), add the rows in order, and convert to rows.dtype at the very end.",
    ],
    "overflowed": [
        "If one rank skips the step and the others do not, their weights part: all must hear of it.",
        "Put 1.0 or 0.0 into a tensor of one element and all_reduce its maximum.",
        "A rank without gradients must take part too, or the others wait for it.",
    ],
    "unscale_and_clip": [
        "First convert, then unscale, then measure, then clip: the limit is meant for the true gradient.",
        "One norm for all gradients together: the root of the sum of the squares of all elements.",
        "limit / norm multiplies every gradient, but only when norm > limit.",
    ],
    "DynamicLossScaler": [
        "Two counters: good steps since the last overflow, and how many overflows are left until one halves.",
        "Overflow: the good steps begin at 0 again; with more than one left take one away, else halve.",
        "Good step: if good_steps is a multiple of window, and not 0, double and refill; then count this step.",
    ],
    "MasterWeights": [
        "nn.Parameter(p.detach().float()) is a copy in fp32 if p is in 16 bits.",
        "step: give each master its gradient, let the optimizer step, copy each master into its parameter.",
        "Afterwards set .grad of both to None: a kept gradient is 4 more bytes a parameter.",
    ],
    "memory_bytes": [
        "Decide for each class how many elements a rank holds: params, or params // ranks.",
        "ZeRO-1 divides the optimizer's state and the masters, ZeRO-2 gradients too, ZeRO-3 parameters too.",
        "AdamW has 4 + 4 bytes an element, whatever the model's dtype; the masters 4, only below fp32.",
    ],
    "sent_bytes": [
        "A reduce-scatter or an all-gather of B bytes sends B (N - 1)/N from each rank, an all-reduce twice that.",
        "Count how often each happens in a step: which ones happen with every micro-batch?",
        "ZeRO-3 gathers parameters in forward and again in backward, and needs no gather after the step.",
    ],
}
