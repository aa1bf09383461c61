"""Muon: the momentum of a matrix, made orthogonal, is its step; all that is no hidden layer's matrix gets AdamW's.

m = momentum * m + (1 - momentum) * g;  u = momentum * m + (1 - momentum) * g
p -= lr * (sqrt(max(1, rows / columns)) * orthogonal(u) + weight_decay * p)

A gradient of a matrix is mostly a few directions. Its nearest orthogonal matrix, U V^T of U S V^T, takes each direction
alike. Newton-Schulz comes near it by products alone: X <- a X + (b X X^T + c (X X^T)^2) X, five times in bf16, moves
every singular value, divided by their norm at first, to between 0.7 and 1.2.
4 bytes of state a matrix's element in fp32 where AdamW keeps 8, and 2 while it steps.

The momentum is element-wise, orthogonal() is not: it needs the whole matrix. Where a rank has a part of it, the parts
of u travel in bf16 (`whole_matrices`, set by a ZeRO stage: zero/optimizer/whole_matrices.py), so DDP and ZeRO-1, 2, 3
end with the bits of one process. Jordan 2024, kellerjordan.github.io/posts/muon; Liu et al. 2025, arXiv:2502.16982,
algorithm 1.
DeepSpeed's file: runtime/zero/muon/original_muon.py. Its "gram" is the same polynomial by way of X X^T, in fp16; it
clips what has been made orthogonal, here gradients are clipped as for every optimizer.
"""

import math
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.optimizer import ParamsT

from refimpl.optim.base import Base, Moved
from refimpl.optim.lamb import check_adam

A, B, C = 3.4445, -4.7750, 2.0315  # of the polynomial: steep at 0, so that small singular values grow fast
STEPS = 5
LR = {True: 0.02, False: 3e-4}  # by `use_muon`


class Muon(Base):
    """Muon for what `is_hidden` says, AdamW for the rest: each group becomes two, told apart by `use_muon`.

    A group that has `use_muon` stays one. Parameters, gradients, `momentum_buffer`, and `exp_avg`, `exp_avg_sq` of the
    rest, share shape and dtype.

    torch's OneCycleLR and CyclicLR cycle one thing of all groups, `betas` where an optimizer has them: that is AdamW's
    part alone. (DeepSpeed's Muon they refuse.) `OneCycle` of refimpl.optim.cycle cycles the momentum of either kind.
    """

    layerwise = True  # ZeRO may cut its parameters where it brings the parts of matrices together

    def __init__(
        self,
        params: ParamsT,
        lr: float | None = None,
        muon_lr: float | None = None,
        adam_lr: float | None = None,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-10,
        adam_w_mode: bool = True,
        ns_method: Literal["gram", "standard"] = "gram",
    ) -> None:
        """muon_lr, adam_lr: of either kind, before `lr`; 0.02 and 3e-4 without. ns_method: DeepSpeed's, without effect.

        ValueError for what is out of range, for a vector in a group whose `use_muon` is true, and for a complex matrix.
        """
        rates = {kind: one for kind, one in ((True, muon_lr), (False, adam_lr)) if one is not None}
        self._rates = (LR if lr is None else dict.fromkeys(LR, lr)) | rates
        check_adam("Muon", min(self._rates.values()), betas, eps, weight_decay, amsgrad=False)
        if not 0 <= momentum < 1:
            raise ValueError(f"Muon needs a momentum in [0, 1): {momentum=}")
        if ns_method not in ("gram", "standard"):
            raise ValueError(f"Muon knows the ns_method gram and standard: {ns_method=}")
        options = {"momentum": momentum, "weight_decay": weight_decay, "betas": betas, "eps": eps}
        # torch looks for `fused` when it loads a state: the counts of steps go where the parameters are
        super().__init__(params, {**options, "adam_w_mode": adam_w_mode, "fused": True, "lr": self._rates[True]})

    def __getstate__(self) -> dict[str, Any]:
        """Torch's, of which a copy or a pickled one is made, with what groups that come later need."""
        return {**super().__getstate__(), "_rates": self._rates}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Torch's, of one kind at a time; also one that has nothing here, as on other pipeline stages."""
        given = param_group["params"]
        found = [given] if isinstance(given, Tensor) else list(given)
        tensors = [p[1] if isinstance(p, tuple) else p for p in found]
        names: dict[str, Any] = {"param_names": []} if any(isinstance(p, tuple) for p in found) else {}
        told = param_group.get("use_muon")
        kinds = [is_hidden(p) if told is None else bool(told) for p in tensors]
        for p, kind in zip(tensors, kinds, strict=True):
            if kind and not has_heads(p, heads := heads_of(p)):
                raise ValueError(f"Muon: muon_num_heads={heads!r} does not divide the rows of {tuple(p.shape)}")
        vectors = [tuple(p.shape) for p, kind in zip(tensors, kinds, strict=True) if kind and p.ndim < 2]
        if vectors:
            raise ValueError(f"Muon: a parameter of shape {vectors[0]} is no matrix: give it use_muon=False")
        if any(kind and p.is_complex() for p, kind in zip(tensors, kinds, strict=True)):
            raise ValueError("Muon: a complex matrix would lose its imaginary part: give it use_muon=False")
        for kind in (True, False) if told is None else (bool(told),):
            here = [p for p, its in zip(found, kinds, strict=True) if its == kind]
            own = {"lr": self._rates[kind], "use_muon": kind, **names}
            super().add_param_group({**own, **param_group, "params": here})

    def update(self, moved: Moved) -> None:
        """See the formulas above. A collective where `whole_matrices` is one."""
        hidden = [(p, group) for p, group in moved if group["use_muon"]]
        updates = self.whole_matrices([p for p, _ in hidden], [self.averaged(p, group) for p, group in hidden])
        for (p, group), update in zip(hidden, updates, strict=True):
            p.mul_(1 - group["lr"] * group["weight_decay"])
            p.add_(update.view_as(p), alpha=-group["lr"])
        for group in self.param_groups:
            if not group["use_muon"]:
                self.adamw([p for p in group["params"] if p.grad is not None], group)

    def averaged(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        """Take the gradient into p's momentum. -> u, p's shape, bf16"""
        assert p.grad is not None
        state, momentum = self.state[p], group["momentum"]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.contiguous_format)
        state["momentum_buffer"].lerp_(p.grad, 1 - momentum)
        return p.grad.lerp(state["momentum_buffer"], momentum).bfloat16()

    def whole_matrices(self, params: list[Tensor], updates: list[Tensor]) -> list[Tensor]:
        """u of each part of a matrix that is in `params` -> the same part of `made(u of the whole matrix)`.

        The parts are the whole, unless a stage puts its own in this one's place.
        """
        return [made(u, heads_of(p)) for p, u in zip(params, updates, strict=True)]

    def adamw(self, params: list[Tensor], group: dict[str, Any]) -> None:
        """Torch's fused AdamW, or Adam without `adam_w_mode`."""
        for p in params:
            if not self.state[p]:
                first, second = (torch.zeros_like(p, memory_format=torch.contiguous_format) for _ in range(2))
                step = torch.zeros((), dtype=torch.float32, device=p.device)
                self.state[p] |= {"step": step, "exp_avg": first, "exp_avg_sq": second}
        states = [self.state[p] for p in params]
        adam(
            params, [p.grad for p in params if p.grad is not None],
            [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states], [], [s["step"] for s in states],
            fused=group["fused"], amsgrad=False, maximize=False, beta1=group["betas"][0], beta2=group["betas"][1],
            lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"],
            decoupled_weight_decay=group["adam_w_mode"],
        )  # fmt: skip


def is_hidden(p: Tensor) -> bool:
    """Whether p is moved by Muon: as its attribute `use_muon` says, else if it is a matrix."""
    return bool(getattr(p, "use_muon", p.ndim > 1))


def heads_of(p: Tensor) -> int:
    """As how many matrices, one below the other, p is moved: as its attribute `muon_num_heads` says, else one."""
    return getattr(p, "muon_num_heads", None) or 1


def has_heads(p: Tensor, heads: Any) -> bool:
    """Whether p can be so many matrices one below the other. A convolution is one alone."""
    return heads == 1 or (type(heads) is int and heads > 0 and p.ndim in (2, 3) and p.shape[-2] % heads == 0)


def made(u: Tensor, heads: int = 1) -> Tensor:
    """u [..., rows, columns], or a convolution's [out, in, height, width] -> the step it becomes, bf16 [same].

    A convolution is one matrix, of a row a filter; its length is by height and width, as in Jordan's code.
    heads: made by blocks of rows / heads rows.
    """
    rows, columns = u.shape[-2] // heads, u.shape[-1]
    each = u.reshape(*u.shape[:-2], heads, rows, columns) if heads > 1 else u
    flat = u.flatten(1) if u.ndim == 4 else each
    step: Tensor = orthogonal(flat).view_as(u)
    return step.mul_(math.sqrt(max(1, rows / max(1, columns))))


def orthogonal(g: Tensor) -> Tensor:
    """g [..., rows, columns] -> nearly U V^T of its U S V^T, bf16 [..., rows, columns]; by products alone."""
    x: Tensor = g.to(torch.bfloat16)
    if is_tall := g.shape[-2] > g.shape[-1]:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)  # no singular value is above 1
    for _ in range(STEPS):
        gram = x @ x.mT
        x = A * x + (B * gram + C * gram @ gram) @ x
    return (x.mT if is_tall else x).contiguous()
