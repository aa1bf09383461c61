"""The update: a torch optimizer over the slices that this rank owns, in fp32.

Owned slices in low precision get an fp32 master copy (Micikevicius et al. 2018, arXiv:1710.03740): 4 bytes a parameter,
plus the optimizer's own state (AdamW: 8), all divided by N from ZeRO-1 on. An element-wise optimizer does not notice
that its parameters were cut out of longer ones, which is why any of them may be sharded.
DeepSpeed: deepspeed/runtime/zero/stage_1_and_2.py, `step` and `unscale_and_clip_grads`.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn, optim

from refimpl.comm.group import Group
from refimpl.optim.loss_scale import LossScaler
from refimpl.zero.config import ZeroConfig
from refimpl.zero.flat import Bucket

ELEMENTWISE = (
    optim.AdamW, optim.Adam, optim.SGD, optim.Adagrad, optim.RMSprop, optim.Adadelta, optim.Adamax, optim.NAdam,
    optim.RAdam, optim.ASGD, optim.Rprop,
)  # fmt: skip
NORM_BLOCK = 1 << 16  # elements widened to fp64 at a time, so that the copy stays in cache


class Update:
    """Check, unscale, clip and apply gradients to `owned`, and keep the optimizer pointed at it."""

    def __init__(
        self,
        optimizer: optim.Optimizer,
        owned: dict[Bucket, Tensor],
        group: Group,
        config: ZeroConfig,
        scaler: LossScaler | None,
        replicated: bool = False,
    ) -> None:
        """`owned`: this rank's slice ([S], or [P] when `replicated` on every rank) of each bucket's parameters.

        TypeError if the optimizer is not known to be element-wise; ValueError if it has already taken steps.
        """
        self.optimizer, self.owned, self.group, self.config = optimizer, owned, group, config
        self.scaler, self.replicated = scaler, replicated
        self.grad_norm: float | None = None
        self.skipped_steps = 0
        refuse_unfit(optimizer, config.allow_untested_optimizer)
        self.masters = {
            bucket: nn.Parameter(mine if mine.dtype == torch.float32 else mine.float(), requires_grad=False)
            for bucket, mine in owned.items()
        }
        point_at(optimizer, self.masters)

    @torch.no_grad()
    def apply(self, gradients: dict[Bucket, Tensor]) -> bool:
        """One optimizer step with the mean gradients of every bucket; False if any rank's were not finite.

        A skipped step changes nothing but the loss scale. Clipping is folded into the unscaling.
        """
        scale = self.scaler.scale if self.scaler else 1.0
        squares = self._sum_of_squares(list(gradients.values()), exact=self.config.gradient_clipping > 0)  # [1] fp64
        if not torch.isfinite(squares):  # or are the squares too large for fp32?
            squares = self._sum_of_squares(list(gradients.values()), exact=True)
        finite = bool(torch.isfinite(squares))
        self.grad_norm = squares.sqrt().item() / scale
        if self.scaler:
            self.scaler.update(overflow=not finite)
        if not finite:
            self.skipped_steps += 1
            return False
        factor = self._clip_factor() / scale
        for bucket, master in self.masters.items():
            grad = gradients[bucket].to(torch.float32)
            master.grad = grad.mul_(factor) if factor != 1 else grad
        self.optimizer.step()
        for bucket, master in self.masters.items():
            master.grad = None
            self.publish(bucket)
        return True

    def publish(self, bucket: Bucket) -> None:
        """Round the fp32 master into the owned slice (nothing to do when they are the same memory)."""
        if self.owned[bucket].dtype != torch.float32:
            self.owned[bucket].copy_(self.masters[bucket])

    def _sum_of_squares(self, gradients: list[Tensor], exact: bool) -> Tensor:
        """Over all ranks, each element once -> [1] fp64. `exact`: squared in fp64, three times the time.

        Then nothing overflows, and the norm rounds to the same fp32 number however the parameters are cut: clipping
        keeps the stages equal bit for bit.
        """
        device = gradients[0].device if gradients else self.group.device
        total = torch.zeros(1, dtype=torch.float64, device=device)
        for gradient in gradients:
            for block in torch.split(gradient, NORM_BLOCK if gradient.device.type == "cpu" else gradient.numel()):
                wide = block.to(torch.float64 if exact else torch.float32)
                total += torch.dot(wide, wide)
        if not self.replicated:
            self.group.all_reduce(total, "sum", tag="norm")
        return total

    def _clip_factor(self) -> float:
        limit, norm = self.config.gradient_clipping, self.grad_norm
        return min(1.0, limit / (norm + 1e-6)) if limit and norm else 1.0

    def state(self) -> list[Tensor]:
        """The optimizer's own tensors (AdamW: two [S] a bucket, and a step count)."""
        return [t for s in self.optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]

    def state_dict(self) -> dict[str, Any]:
        return {
            "optimizer": self.optimizer.state_dict(),
            "masters": [m.data for m in self.masters.values()],
            "scaler": self.scaler.state_dict() if self.scaler else None,
            "skipped_steps": self.skipped_steps,
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.skipped_steps = state["skipped_steps"]
        if self.scaler:
            self.scaler.load_state_dict(state["scaler"])
        for (bucket, master), saved in zip(self.masters.items(), state["masters"], strict=True):
            master.copy_(saved)
            self.publish(bucket)


def refuse_unfit(optimizer: optim.Optimizer, allow_untested: bool) -> None:
    """Raise if sharding this optimizer's parameters would change what it computes."""
    kind = type(optimizer)
    if kind not in ELEMENTWISE and not getattr(kind, "elementwise", False) and not allow_untested:
        known = ", ".join(k.__name__ for k in ELEMENTWISE)
        raise TypeError(
            f"{kind.__name__} is not known to be element-wise: on a shard it would compute something else. "
            f"Known: {known}, Lion. If every element's update depends on that element alone, set "
            "allow_untested_optimizer=True (zero_allow_untested_optimizer), or `elementwise = True` on its class"
        )
    if any(float(s.get("step", 0)) > 0 for s in optimizer.state.values()):
        raise ValueError(f"{kind.__name__} has already taken steps: build the stage first, then load its state")


def point_at(optimizer: optim.Optimizer, masters: dict[Bucket, nn.Parameter]) -> None:
    """Make the optimizer, in place, one over `masters`: its groups and their options stay, so do schedulers on it."""
    accepted = inspect.signature(type(optimizer).__init__).parameters
    groups = [
        {**g, "params": [m for b, m in masters.items() if b.group_index == i]}
        for i, g in enumerate(optimizer.param_groups)
    ]
    # Some optimizers (Adagrad) make their state when constructed: let a fresh one make it for the new parameters.
    fresh = type(optimizer)(groups, **{k: v for k, v in optimizer.defaults.items() if k in accepted})
    for old, new in zip(optimizer.param_groups, fresh.param_groups, strict=True):
        old["params"] = new["params"]
    optimizer.state = fresh.state
