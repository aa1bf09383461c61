"""LAMB: Adam's direction, with each layer's step as long as a share of the layer's own weights.

m = beta1 * m + (1 - beta1) * g;  v = beta2 * v + (1 - beta2) * g**2;  u = m / (sqrt(v) + eps) + weight_decay * p
ratio = |p| / |u|, held between min_coeff and max_coeff, and 1 where either norm is 0
p -= lr * sqrt(1 - beta2**t) / (1 - beta1**t) * ratio * u          (without bias_correction: lr * ratio * u)

|p| and |u| are norms of a whole parameter ("layer"). Where a rank has a part of it, the squares of the parts are added
up over the ranks (`whole_squares`, set by a ZeRO stage), in fp64, so that the ratio rounds to the same fp32 number
however the parameter is cut; all else is element-wise, so DDP and ZeRO-1, 2, 3 end with the bits of one process.
8 bytes of state a parameter in fp32, and one tensor as large as the largest parameter while it steps. Traffic in a
stage that shards: an all-reduce of 16 bytes a parameter tensor.
You et al. 2019, arXiv:1904.00962, algorithm 2, which corrects m and v before the ratio is taken; DeepSpeed's kernel,
which this follows, corrects the step's length after it: csrc/lamb/fused_lamb_cuda_kernel.cu, ops/lamb/fused_lamb.py.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from refimpl.optim.base import Base, Moved

BLOCK = 1 << 16  # elements widened to fp64 at a time


class Lamb(Base):
    """LAMB with DeepSpeed's arguments. Parameters, gradients, `exp_avg` and `exp_avg_sq` share shape and dtype."""

    layerwise = True  # ZeRO may cut its parameters where it adds up the squares of the parts
    ratios: Sequence[float] = ()  # of the last step, one for each parameter that it moved

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        """`eps_inside_sqrt`: u = m / sqrt(v + eps) + ... ValueError for what is out of range, and for amsgrad."""
        name = type(self).__name__
        check_adam(name, lr, betas, eps, weight_decay, amsgrad)
        if not 0 <= min_coeff <= max_coeff:
            raise ValueError(f"{name} needs 0 <= min_coeff <= max_coeff: {min_coeff=} {max_coeff=}")
        options = {
            "lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps,
            "eps_inside_sqrt": eps_inside_sqrt, "weight_decay": weight_decay,
            "max_coeff": max_coeff, "min_coeff": min_coeff,
        }  # fmt: skip
        super().__init__(params, options)

    def update(self, moved: Moved) -> None:
        """See the formulas above. A collective where `whole_squares` is one."""
        for p, group in moved:
            self.moments(p, group)
        # [K, 2]; K may be 0 here, and other ranks then wait for this one all the same
        squares = [torch.stack([squared(p), squared(direction(p, self.state[p], group))]) for p, group in moved]
        norms = self.whole_squares(
            [p for p, _ in moved], torch.stack(squares) if squares else torch.zeros(0, 2, dtype=torch.float64)
        )
        rows: list[list[float]] = norms.sqrt().tolist()
        self.ratios = [ratio(row[0], row[1], group) for row, (_, group) in zip(rows, moved, strict=True)]
        for held, (p, group) in zip(self.ratios, moved, strict=True):
            p.sub_(direction(p, self.state[p], group).mul_(length(float(self.state[p]["step"]), group) * held))

    def moments(self, p: Tensor, group: dict[str, Any]) -> None:
        """Take the gradient into p's state."""
        assert p.grad is not None
        state, (beta1, beta2) = self.state[p], group["betas"]
        if "step" not in state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        state["step"] += 1
        state["exp_avg"].mul_(beta1).add_(p.grad, alpha=1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)

    def whole_squares(self, params: list[Tensor], squares: Tensor) -> Tensor:
        """Sums of squares [K, 2] of the parts of parameters that are `params` -> of the whole parameters.

        The parts are the whole, unless a stage puts its own in this one's place.
        """
        return squares

    def get_lamb_coeffs(self) -> list[float]:
        """The last step's ratios, one for each parameter that it moved."""
        return list(self.ratios)


def check_adam(
    name: str, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, amsgrad: bool
) -> None:
    """ValueError for options of Adam that are out of range."""
    if not (lr >= 0 and weight_decay >= 0 and eps >= 0 and len(betas) == 2 and all(0 <= beta < 1 for beta in betas)):
        raise ValueError(
            f"{name} needs lr, eps and weight_decay >= 0 and two betas in [0, 1): {lr=} {eps=} {weight_decay=} {betas=}"
        )
    if amsgrad:
        raise ValueError(f"{name} has no AMSGrad variant: leave amsgrad out")


def denominator(variance: Tensor, group: dict[str, Any]) -> Tensor:
    """sqrt(v) + eps, or sqrt(v + eps); in new memory."""
    eps: float = group["eps"]
    return (variance + eps).sqrt_() if group["eps_inside_sqrt"] else variance.sqrt().add_(eps)


def direction(
    p: Tensor, state: dict[str, Any], group: dict[str, Any], root: Tensor | None = None, correction: float = 1.0
) -> Tensor:
    """u = m / root / correction + weight_decay * p, in new memory; root: sqrt(v) + eps if it is not given."""
    u: Tensor = state["exp_avg"] / (denominator(state["exp_avg_sq"], group) if root is None else root)
    u = u if correction == 1 else u.div_(correction)
    return u.add_(p, alpha=group["weight_decay"]) if group["weight_decay"] else u


def length(step: float, group: dict[str, Any]) -> Tensor | float:
    """What the ratio of a parameter's step number `step` is multiplied by."""
    lr: Tensor | float = group["lr"]
    beta1, beta2 = group["betas"]
    return lr * (math.sqrt(1 - beta2**step) / (1 - beta1**step)) if group["bias_correction"] else lr


def squared(x: Tensor) -> Tensor:
    """x of any shape -> its sum of squares, fp64."""
    if x.device.type != "cpu":
        (norm,) = torch._foreach_norm([x], dtype=torch.float64)  # vector_norm would widen all of x before the kernel
        return norm.square()
    total = torch.zeros((), dtype=torch.float64)
    for block in torch.split(x.reshape(-1), BLOCK):
        wide = block.double()
        total += torch.dot(wide, wide)
    return total


def ratio(weights: float, direction: float, group: dict[str, Any]) -> float:
    """|p| / |u| of the two norms, within the group's bounds; 1, whatever the bounds, where either is 0."""
    if not (weights > 0 and direction > 0):
        return 1.0
    return float(min(max(weights / direction, group["min_coeff"]), group["max_coeff"]))
