"""What DDP and the three stages have in common for whoever trains with one: backward, step, and what they report.

stage = Zero2(model, optimizer, Group.world())
stage.backward(model(batch))     # in place of loss.backward()
stage.step()                     # in place of optimizer.step() and optimizer.zero_grad()
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn, optim

from refimpl.comm.group import Group
from refimpl.optim.loss_scale import LossScaler
from refimpl.zero.config import ZeroConfig
from refimpl.zero.flat import Bucket
from refimpl.zero.gradients import Gradients
from refimpl.zero.update import Update


class Stage(ABC):
    """A data-parallel strategy around a model. Subclasses set `buckets`, `gradients` and `update`."""

    buckets: list[Bucket]
    gradients: Gradients
    update: Update

    def __init__(self, model: nn.Module, group: Group, config: ZeroConfig) -> None:
        self.model, self.group, self.config = model, group, config
        self.names = {p: name for name, p in model.named_parameters()}

    def backward(self, loss: Tensor, sync: bool = True) -> None:
        """Compute gradients of `loss` (a scalar, the mean over this rank's micro-batch) and reduce them on the way.

        Gradients of several calls before a step add up; to average over A micro-batches, divide the loss by A.
        `sync=False` for all but the last of them lets DDP and ZeRO-1 send once a step. ZeRO-2 and ZeRO-3 have no
        room for a whole gradient and always send. fp16: the loss is multiplied by the loss scale here.
        """
        scaled = loss.float() * self.scaler.scale if self.scaler else loss
        self.gradients.backward(scaled, sync)

    @abstractmethod
    def reduce(self, bucket: Bucket, local: Tensor) -> Any:
        """Start the reduction of a full bucket; runs inside backward."""

    @abstractmethod
    def gather(self) -> None:
        """Bring the updated parameters to where the next forward needs them."""

    @abstractmethod
    def step(self) -> bool:
        """Apply the gradients. False if skipped because a gradient on any rank was not finite."""

    def state_dict(self) -> dict[str, Any]:
        """What this rank owns (references, not copies): optimizer state, fp32 weights, loss scale."""
        return {"stage": type(self).__name__, "ranks": self.group.size, **self.update.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`, on every rank. ValueError for another stage or number of ranks."""
        here = {"stage": type(self).__name__, "ranks": self.group.size}
        for key, value in here.items():
            if state[key] != value:
                raise ValueError(f"this state was saved with {key} = {state[key]}, here {key} = {value}")
        self.update.load_state_dict(state)
        self.gather()

    def full_state_dict(self) -> dict[str, Tensor] | None:
        """The model's weights by name on rank 0, None elsewhere: views of the model's own memory, not a copy."""
        return self.model.state_dict() if self.group.rank == 0 else None

    def tensors(self) -> dict[str, list[Tensor]]:
        """Every tensor this stage keeps alive now, by class, for a `MemoryMeter` (views: count their storages)."""
        masters = [m.data for b, m in self.update.masters.items() if b.dtype != torch.float32]
        return {
            "parameters": [p.data for p in self.model.parameters()],
            "gradients": [*self.gradients.total.values(), *self.gradients.local.values()],
            "optimizer": self.update.state(),
            "master weights": masters,
            "gathered": [],
            "buckets": [*self.gradients.buffers(), *self.group.scratch()],
        }

    @property
    def gathering_modules(self) -> int:
        """How many modules gather parameters for themselves: none but in ZeRO-3."""
        return 0

    @property
    def optimizer(self) -> optim.Optimizer:
        return self.update.optimizer

    @property
    def scaler(self) -> LossScaler | None:
        return self.update.scaler

    @property
    def grad_norm(self) -> float | None:
        """Global L2 norm of the last step's gradients: unscaled, before clipping, each parameter counted once."""
        return self.update.grad_norm

    @property
    def skipped_steps(self) -> int:
        return self.update.skipped_steps


def share_start(model: nn.Module, buckets: list[Bucket], group: Group, skip: set[nn.Parameter] | None = None) -> None:
    """Rank 0's weights and buffers on every rank, so that all begin with the same model; `skip` is done already."""
    done = {p for b in buckets for p in b.params} | (skip or set())
    loose = [p.data for p in model.parameters() if p not in done] + list(model.buffers())
    for tensor in [*(b.full for b in buckets), *loose]:
        whole = tensor if tensor.is_contiguous() else tensor.contiguous()
        group.broadcast(whole, tag="start")
        if whole is not tensor:
            tensor.copy_(whole)
