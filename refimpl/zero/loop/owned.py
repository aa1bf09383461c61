"""A torch optimizer that a stage has taken over: what a training loop calls on it, the stage does.

The object stays the caller's, so schedules, Trainers and `isinstance` go on working; its class becomes a subclass of
what it was. `step` is the stage's step, a closure included; `zero_grad` drops what the stage has not applied;
`add_param_group` makes the stage train more of the model. Its parameters are this rank's slices (see `Slices`).
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, optim

from refimpl.optim.loss_scale import DynamicLossScaler
from refimpl.zero.agreement.settings import settings
from refimpl.zero.loop.grad_view import NO_GRAD_SCALER
from refimpl.zero.norm import GradNorm
from refimpl.zero.optimizer.whole_state import take_whole

if TYPE_CHECKING:
    from refimpl.zero.stage import Stage

BESIDE = {"slices_of", "masters", "scaler"}  # what `state_dict` has beside torch's
MODES = "train", "eval"  # of an optimizer that trains other weights than it shows (schedule-free)


class Owned(optim.Optimizer):
    """Mixed in before the optimizer's own class."""

    stage: "Stage"

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As torch: nothing without a gradient; returns what the closure does."""
        return self.stage.optimizer_step(closure)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # a torch schedule need not wrap it

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.stage.zero_grad()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.stage.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """As torch's, of this rank's slices, and whose they are; see `load_state_dict`.

        Weights in 16 bits do not say what they are rounded from: this does, and with fp16 the loss scale. (DeepSpeed:
        `single_partition_of_fp32_groups`, `loss_scaler`.)
        """
        update = self.stage.update
        state = {**update.brought(super().state_dict()), "slices_of": self._whose()}
        if update.rounds():
            self.stage.parked.refuse()
            state["masters"] = [update.weights(bucket) for bucket in update.masters]
        return state | ({"scaler": update.scaler.state_dict()} if update.scaler else {})

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The inverse of `state_dict`, on the same rank. ValueError for another's.

        One of whole parameters, saved without a stage, is taken too: on every rank, see `whole_state`. So is one with
        masters: the weights follow them.
        """
        update = self.stage.update
        update.refuse_under_way()
        self.stage.include_thawed()  # what is trained from the next forward on takes its state too
        given, here = state_dict.get("slices_of"), self._whose()
        if given is None:
            return take_whole(self.stage, state_dict)
        if given != here:
            raise ValueError(
                f"optimizer.load_state_dict: this state is rank {given['rank']}'s of {given['ranks']}, "
                f"{given['stage']}; here is rank {here['rank']} of {here['ranks']}, {here['stage']}. Every rank saves "
                "and loads its own: optimizer.state_dict(), or stage.state_dict()"
            )
        masters = state_dict.get("masters")
        if masters is not None:
            update.refuse_others(masters)
        super().load_state_dict({k: v for k, v in state_dict.items() if k not in BESIDE})
        update.take(masters)
        if update.scaler and "scaler" in state_dict:
            update.scaler.load_state_dict(state_dict["scaler"])
        if masters is not None:
            self.stage.gather()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Neither copied nor pickled: its parameters are one rank's slices, and its steps the stage's."""
        raise TypeError(
            f"a {type(self).__name__} that {type(self.stage).__name__} has taken over cannot be copied or pickled: "
            "optimizer.state_dict() is this rank's part of its state, and a checkpoint has it all"
        )

    def _whose(self) -> dict[str, Any]:
        shared = self.stage.update.replicated() and not self.stage.parted  # every rank has the same
        rank = 0 if shared else self.stage.group.rank
        return {"stage": type(self.stage).__name__, "rank": rank, "ranks": 1 if shared else self.stage.group.size}

    @property
    def loss_scale(self) -> float:
        """fp16's loss scale; 1 in other dtypes."""
        return self.stage.loss_scale()

    cur_scale = loss_scale  # DeepSpeed has both

    def refresh_fp32_params(self) -> None:
        """Nothing: what is written to the model's weights reaches those in fp32 by itself, by `load_state_dict` too."""

    def override_loss_scale(self, loss_scale: float) -> None:
        """Let the caller's own scaler say fp16's loss scale, from the next backward on. No other dtype has one."""
        if self.stage.scaler is not None:
            self.stage.scaler.hold(loss_scale)

    @property
    def external_loss_scale(self) -> float | None:
        """What `override_loss_scale` was given last, if it was called."""
        scaler = self.stage.scaler
        return scaler.scale if scaler is not None and scaler.held else None

    @property
    def _global_grad_norm(self) -> GradNorm:
        """The last step's, where DeepSpeed keeps it, and as there 0 before the first: scripts of EVA's kind log it."""
        return GradNorm(self.stage.shown_norm or 0.0)

    def scaled_global_norm(self, norm_type: int = 2) -> GradNorm:
        """The norm that the next step would find, times fp16's loss scale: LMOps' trainers log it. A collective."""
        if norm_type != 2:
            raise ValueError(f"scaled_global_norm: norm_type={norm_type!r}: it is the L2 norm, norm_type=2")
        return GradNorm(self.stage.norm_now())

    @property
    def optimizer(self) -> "Owned":
        """Where DeepSpeed's wrapper has the optimizer that it wraps: this one."""
        return self

    @property
    def single_partition_of_fp32_groups(self) -> list[Tensor]:
        """What is stepped: this rank's slices, flat, in fp32 where the model is in 16 bits."""
        return [p for group in self.param_groups for p in group["params"]]

    fp32_groups_flat = fp32_partitioned_groups_flat = single_partition_of_fp32_groups  # DeepSpeed's, by stage

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale adapts itself."""
        return isinstance(self.stage.scaler, DynamicLossScaler)

    def needs_scaler(self) -> bool:
        """Whether a `backward()` called by hand must begin at `engine.scale(loss)`."""
        return self.stage.scaler is not None

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped, because some rank had a gradient that was not finite."""
        norm = self.stage.grad_norm
        return norm is not None and not math.isfinite(norm)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What torch.amp.GradScaler asks before it steps."""
        raise RuntimeError(NO_GRAD_SCALER)


def not_taken(optimizer: optim.Optimizer | None) -> optim.Optimizer | None:
    """The optimizer. ValueError if it is a stage's already: what it holds are slices, of no model's parameters."""
    if isinstance(optimizer, Owned):
        raise ValueError(
            f"this {type(optimizer).__name__} belongs to {type(optimizer.stage).__name__} already: make an optimizer "
            "for each stage, put the models in one nn.ModuleList under one stage, or release() that one first (an "
            "engine's destroy())"
        )
    return optimizer


def take_over(optimizer: optim.Optimizer, stage: "Stage") -> None:
    """From now on `optimizer` is the stage's."""
    kind = type(optimizer)
    vars(optimizer).pop("step", None)  # a schedule that was made before wrapped it
    more: dict[str, Any] = {"__module__": kind.__module__, "__doc__": kind.__doc__}
    more |= {name: into(name, getattr(kind, name)) for name in MODES if hasattr(kind, name)}
    optimizer.__class__ = owned_before(kind)(kind.__name__, (kind, Owned), more)
    optimizer.stage = stage  # type: ignore[attr-defined]


def owned_before(kind: type) -> Any:
    """A metaclass: a class that has `kind` first among its bases, and looks things up in `Owned` first.

    An object's class may change to one of the same memory layout only. Python takes that from the first of the bases,
    and behind an ABC (all of pytorch_optimizer's have one before Optimizer) it is another than `Owned`'s. A class made
    of this one and others, as Lightning's wrapper of an optimizer is, looks things up as any does.
    """

    def mro(cls: type) -> list[type]:
        return [cls, Owned, *kind.__mro__] if cls.__bases__ == (kind, Owned) else type.mro(cls)

    return type("Taken", (type(kind),), {"mro": mro})


def into(name: str, switch: Callable[..., None]) -> Callable[[Owned], None]:
    """The optimizer's own `train` or `eval`, which rewrites its parameters; nothing where it is in that mode."""

    def of_stage(optimizer: Owned) -> None:
        slices = optimizer.stage.update.slices
        given, before = slices.settings(), slices.settings_in_words()
        switch(twin := slices.twin(given, {}))
        changed = any(vars(twin)[key] is not value for key, value in given.attributes.items())
        if changed or settings(twin, slices.kind.cls, waits=False) != before:
            optimizer.stage.rewrite(switch)

    of_stage.__name__, of_stage.__doc__ = name, f"{switch.__doc__ or name}\n\nA collective: on every rank."
    return of_stage


def let_go(optimizer: optim.Optimizer) -> None:
    """The optimizer is an ordinary one again."""
    if isinstance(optimizer, Owned):
        del optimizer.stage
        optimizer.__class__ = type(optimizer).__mro__[2]
