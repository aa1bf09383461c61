"""The engine: a model, its ZeRO stage and its schedule behind three calls, `engine(batch)`, `backward`, `step`.

    engine, optimizer, loader, scheduler = refimpl.initialize(model=model, config="ds_config.json")
    for batch in loader:
        loss = engine(batch)      # the model's own forward
        engine.backward(loss)     # loss / gradient_accumulation_steps, scaled; reduced at the boundary
        engine.step()             # at the boundary: check, clip, update, gather; otherwise only counts

One walk, `step`: `is_gradient_accumulation_boundary` -> `stage.step` -> `lr_scheduler.step` -> `report.after_update`.
DeepSpeed's file: deepspeed/runtime/engine.py. What is different here, on purpose:

- Micro-batches are counted when they go backward, not when `step` is called, and gradients are always added up: three
  `backward` and one `step` update with the sum of the three (DeepSpeed's stages 1 and 2 keep the last one), and N
  `backward` and one `step` update at once when N micro-batches are a batch (DeepSpeed waits for N `step` calls).
- A plain `loss.backward()` is as good, in every stage (`engine.scale(loss).backward()` in fp16), and is counted by
  `step`. Every gradient that reaches a parameter is divided by gradient_accumulation_steps, whatever way the loss went:
  through the engine, the bare model, or two engines (DeepSpeed divides at the engine's outputs).
- `backward` returns the loss that it was given, the number to log. DeepSpeed returns it divided by the accumulation.
- A gradient that is not finite on any rank skips the update on all, in every stage and dtype.
- `get_global_grad_norm` is a number after every step, in every stage and dtype.
"""

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from refimpl.activation.checkpoint import Checkpoint
from refimpl.engine import checkpoint, resume, weights
from refimpl.engine.activations import checkpointer
from refimpl.engine.asked import Asked
from refimpl.engine.build import Parts
from refimpl.engine.dataloader import RepeatingLoader
from refimpl.engine.module_state import ModuleState
from refimpl.engine.report import Report, mean_loss
from refimpl.engine.small_states import Wanted
from refimpl.measure.throughput import ThroughputTimer
from refimpl.zero.norm import GradNorm, shown
from refimpl.zero.parameter import stage_of
from refimpl.zero.zero3 import Zero3


class Engine(ModuleState, Asked):
    """Trains `module` as the configuration says. Made by `initialize`, on every rank alike.

    Its counters are those of `TrainingState`. `group.ledger` holds the collectives since the first forward after the
    last update.
    """

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.report, self.monitor = Report(parts), parts.monitor
        self.tput_timer = ThroughputTimer()
        self.device = self.group.device
        self.local_rank = int(os.environ.get("LOCAL_RANK", self.axes.world.rank))
        self._step_applied = False
        self._boundary: bool | None = None  # what the client said, if it did
        self._syncing = True  # False inside no_sync
        self._pending = 0  # micro-batches gone backward since the last call of step
        self._accumulated = 0  # micro-batches since the last update
        self.stage.gradients.divisor = self.config.gradient_accumulation_steps

    @cached_property
    def activation_checkpoint(self) -> Checkpoint:
        """For the model's own use: engine.activation_checkpoint(block, x). ConfigError for an arena without a size."""
        return checkpointer(self.config.activation_checkpointing, self.axes.tensor, self.axes.world.rank)

    def __getattr__(self, name: str) -> Any:
        """What an engine does not have is the model's: `engine.generate`."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            model = self.__dict__["_modules"].get("module")
            if not hasattr(model, name):
                kind = type(model).__name__
                raise AttributeError(f"{type(self).__name__} has no attribute {name!r}, nor has its {kind}") from None
            return getattr(model, name)

    # The three calls.

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The model's forward. Floating-point inputs are cast to fp16 only with `fp16.auto_cast`, as in DeepSpeed."""
        if self._accumulated + self._pending == 0:
            self.group.ledger.reset()
        if self.config.fp16.enabled and self.config.fp16.auto_cast:
            inputs, kwargs = tree_map_only(Tensor, to_half, (inputs, kwargs))
        if self.training:
            self.tput_timer.start()
        with self.report.time("fwd"), self._autocast(), self._dtypes_told(inputs, kwargs):
            return self.module(*inputs, **kwargs)

    @contextmanager
    def _dtypes_told(self, *inputs: Any) -> Iterator[None]:
        """torch's "must have the same dtype" names neither the input nor the key that has made the model 16-bit."""
        try:
            yield
        except RuntimeError as error:
            dtype, given = self.config.dtype, {x.dtype for x in tree_leaves(inputs) if isinstance(x, Tensor)}
            halved = dtype != torch.float32
            if halved and "type" in str(error) and any(kind.is_floating_point and kind != dtype for kind in given):
                key = "fp16" if dtype == torch.float16 else "bf16"
                error.add_note(
                    f"{key}.enabled has made the model {dtype}, and an input is not: cast it, or let the engine: "
                    '"fp16": {"auto_cast": true}, or in place of the section "torch_autocast": {"enabled": true}'
                )
            raise

    def _autocast(self) -> AbstractContextManager[Any]:
        """As the configuration says; where it says nothing, a script's own autocast around the call goes on.

        torch's cache has one rounded copy of a weight serve all products, whose gradients are then added up in 16 bits.
        Without it (ZeRO-3) each product has a copy of its own, and they are added up in fp32: of a weight that several
        products use the bits are those of `torch.autocast(cache_enabled=False)`. A script's own has the cache.
        """
        asked, stage = self.config.torch_autocast, self.config.zero_optimization.stage
        if not asked.enabled:
            return nullcontext()
        # The cache would keep every rounded weight until forward is over, which ZeRO-3 has no memory for.
        return torch.autocast(self.device.type, asked.dtype, cache_enabled=stage < 3)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Add the gradient of loss / gradient_accumulation_steps (of loss, if not `scale_wrt_gas`); return `loss`.

        loss: a scalar with a graph, ValueError otherwise. The gradient is averaged over ranks by the time it is used.
        """
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"engine.backward: the loss must be a scalar tensor, not {what}")
        self._pending += 1
        self.report.loss(loss)
        gradients = self.stage.gradients
        gradients.divisor = self.gradient_accumulation_steps() if scale_wrt_gas else 1
        sync = self._syncing and self.is_gradient_accumulation_boundary()
        try:
            with self.report.time("bwd"):
                self.stage.backward(loss, sync=sync, retain_graph=retain_graph)
        finally:
            gradients.divisor = self.gradient_accumulation_steps()
        return loss

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times fp16's loss scale, for a `backward()` called by hand; the loss itself in other dtypes."""
        return self.stage.scale(loss)

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """At the accumulation boundary, update the model and then the learning rate; otherwise only count.

        The learning rate stays where it is when the update was skipped; `lr_kwargs` are for the schedule's `step`.
        RuntimeError inside `no_sync`.
        """
        if not self._syncing:
            raise RuntimeError(
                "engine.step() inside no_sync() or coalesce_grad_reduction(): the gradients are not reduced; leave the "
                "block first"
            )
        due = self.is_gradient_accumulation_boundary() or not self.config.managed_gradient_accumulation
        if due:
            checkpoint.hear(self)
        self.micro_steps += max(1, self._pending)
        self._accumulated += max(1, self._pending)
        self._pending = 0
        self._step_applied = False
        if not due:
            self.tput_timer.stop()
            return
        self.report.before_update()
        accumulated, self._accumulated = self._accumulated, 0  # also if the step raises: its gradients are gone
        with self.report.time("step"):
            self._step_applied = self.stage.step()
        if self._step_applied and self.lr_scheduler is not None:
            self.lr_scheduler.step(**(lr_kwargs or {}))
        self.global_steps += 1
        samples = accumulated * self.train_micro_batch_size_per_gpu() * self.axes.feeds
        self.global_samples += samples
        self.tput_timer.stop(samples)
        self.report.after_update(self.global_steps, self.global_samples, self.get_lr())

    def _backward_epilogue(self) -> None:
        """Nothing: DeepSpeed's recipe for one loss of several engines calls it between `loss.backward()` and `step`."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients since the last update. Micro-batches stay counted, as in DeepSpeed."""
        self.stage.zero_grad()

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """One optimizer step over gradient_accumulation_steps micro-batches; the mean loss over them and all ranks.

        From `data_iter`, or over and over from the training data. A tuple or list is the model's arguments, a mapping
        its keywords, a tensor its only argument; tensors are moved to the engine's device. -> fp32 scalar, detached.
        """
        self.train()
        losses = [self.backward(self._feed(data_iter)).detach() for _ in range(self.gradient_accumulation_steps())]
        self.step()
        return mean_loss(self.group, losses)

    @torch.no_grad()
    def eval_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """The mean loss of as many micro-batches as `train_batch` takes, in evaluation mode, without a gradient."""
        training = self.module.training
        self.eval()
        losses = [self._feed(data_iter) for _ in range(self.gradient_accumulation_steps())]
        self.train(training)
        return mean_loss(self.group, losses)

    # Gradient accumulation.

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-batch under way, or about to begin, completes a batch.

        False with `managed_gradient_accumulation` off: then every `step` updates, and none is known beforehand.
        """
        if self._boundary is not None:
            return self._boundary
        if not self.config.managed_gradient_accumulation:
            return False
        return self._accumulated + max(1, self._pending) >= self.config.gradient_accumulation_steps

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Decide from now on what `is_gradient_accumulation_boundary` answers, whatever has been counted."""
        self._boundary = is_boundary

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients on this rank in the block. RuntimeError in stages 2 and 3, which hold no whole gradient."""
        if self.zero_optimization_stage() >= 2:
            stage = self.zero_optimization_stage()
            raise RuntimeError(f"no_sync: ZeRO stage {stage} shards every micro-batch's gradient; use stage 0 or 1")
        with self._without_step(), self.stage.no_sync():
            yield

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """All `backward` calls in the block are of one step, and stage 1 reduces their sum once, in that step.

        Stages 2 and 3 reduce each of them all the same, as they have no memory for whole gradients (DeepSpeed keeps
        them until the block ends). RuntimeError in another such block; NotImplementedError in stage 0, as in DeepSpeed.
        """
        stage = self.zero_optimization_stage()
        if stage == 0:
            raise NotImplementedError("coalesce_grad_reduction: ZeRO stage 0 reduces once a step anyway: use no_sync")
        if not self._syncing:
            raise RuntimeError("coalesce_grad_reduction() inside no_sync() or another one: leave that block first")
        with self._without_step(), self.stage.no_sync() if stage == 1 else nullcontext():
            yield

    @contextmanager
    def _without_step(self) -> Iterator[None]:
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    # What it is and how it fares.

    @property
    def skipped_steps(self) -> int:
        """Updates skipped because some rank had a gradient that was not finite."""
        return self.stage.skipped_steps

    def was_step_applied(self) -> bool:
        """Whether the last `step` changed the weights."""
        return self._step_applied

    def get_global_grad_norm(self) -> GradNorm | None:
        """L2 norm of the last step's gradient over all ranks, before clipping, unscaled; None before the first step."""
        return shown(self.stage.grad_norm)

    def get_lr(self) -> list[float]:
        """The learning rate of each parameter group."""
        return [float(group["lr"]) for group in self.stage.optimizer.param_groups]

    def get_mom(self) -> list[Any]:
        """The momentum, or Adam's betas, of each parameter group; None where the optimizer has neither."""
        return [group.get("betas", group.get("momentum")) for group in self.stage.optimizer.param_groups]

    def destroy(self) -> None:
        """Let go of model and optimizer: another engine may have them. Stage 3 leaves the model in shards.

        Waits for a save that is under way: a collective then, and CheckpointError on every rank if it failed on one.
        """
        if self.saving.unheard:
            checkpoint.wait(self)
        if isinstance(self.stage, Zero3):
            self.stage.detach_all()
            for p in [p for p in self.stage.names if stage_of(p) is self.stage]:
                del p.stage  # type: ignore[attr-defined]
        else:
            self.stage.release()

    def empty_partition_cache(self) -> None:
        """Free the parameters that stage 3 has gathered ahead or kept for their next use."""
        if isinstance(self.stage, Zero3):
            self.stage.fetch.end()

    def compile(self, backend: str = "inductor", compile_kwargs: Mapping[str, Any] | None = None, **_: Any) -> None:
        """torch.compile the model in place."""
        self.module.compile(backend=backend, **(compile_kwargs or {}))

    # Saving; see refimpl/engine/checkpoint.py and resume.py.

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | float | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        asynchronous: bool | None = None,
    ) -> bool:
        """Write everything that `load_checkpoint` needs to go on. Every rank must call it. Returns True.

        A checkpoint of the same tag is replaced, at once, when all of the new one is on the disk. asynchronous (None:
        as checkpoint.writer.decoupled says): return when all is copied; what fails behind is raised by the next
        `step`, `save_checkpoint`, `load_checkpoint` or `wait_for_checkpoint`. Gradients that wait for an update are not
        saved, which a warning says: who goes on from there begins the batch anew, with the data that follows. (In
        DeepSpeed, with those of its micro-batches that are left.)
        """
        open_ = self._accumulated + self._pending
        if open_ and self.stage.gradients.used and self.group.rank == 0:  # they are not, after optimizer.step() by hand
            warnings.warn(
                f"save_checkpoint: {open_} micro-batch(es) since the last update: their gradients are not saved; save "
                "after a step that updates",
                stacklevel=2,
            )
        behind = self.config.checkpoint.writer.decoupled if asynchronous is None else asynchronous
        state = client_state or {}
        return checkpoint.save(self, save_dir, tag, state, save_latest, exclude_frozen_parameters, behind)

    def wait_for_checkpoint(self) -> None:
        """Return when an asynchronous save is whole on the disk and `latest` names it. Every rank must call it.

        CheckpointError on every rank if it has failed on one.
        """
        checkpoint.wait(self)

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | float | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., object] | None = None,
        load_random_states: bool = True,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Go on from a checkpoint: its path and this rank's client_state, or (None, None) if there is no `latest`.

        From any stage, world size, bucket size and dtype to any other. load_module_only: the weights and nothing else;
        load_optimizer_states=False: all but the optimizer; custom_load_fn(src=weights by name, dst=module) then may do
        it. load_module_strict=False: weights that only one side has stay as they are. load_random_states=False: torch,
        Python and numpy draw on from here. Gradients that wait here for an update are dropped. CheckpointError on every
        rank, the engine unchanged, if the checkpoint is damaged or does not fit.
        """
        wanted = Wanted(
            load_module_strict, load_optimizer_states, load_lr_scheduler_states,
            load_module_only, custom_load_fn, load_random_states,
        )  # fmt: skip
        path, client_state = resume.load(self, Path(load_dir), tag, wanted)
        if path is not None:
            self._accumulated = self._pending = 0
            self.stage.zero_grad()
        return path, client_state

    def save_16bit_model(
        self, save_dir: str | Path, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the whole model's weights in its training dtype. Every rank must call it. False if config forbids."""
        return weights.save_16bit_model(self, Path(save_dir), save_filename, exclude_frozen_parameters)

    save_fp16_model = save_16bit_model  # its older name

    # Inside.

    def _feed(self, data_iter: Iterator[Any] | None) -> Tensor:
        """The model's loss on the next micro-batch."""
        if data_iter is None:
            if self.training_dataloader is None:
                raise ValueError("no data: pass data_iter=..., or training_data=... to initialize")
            self._batches = self._batches or RepeatingLoader(self.training_dataloader)
            data_iter = self._batches
        batch = tree_map_only(Tensor, lambda tensor: tensor.to(self.device), next(data_iter))
        args, kwargs = ((), batch) if isinstance(batch, Mapping) else (batch, {})
        loss: Tensor = self(*(args if isinstance(args, tuple | list) else (args,)), **kwargs)
        return loss


def to_half(tensor: Tensor) -> Tensor:
    """fp16 of a floating-point tensor; others as they are."""
    return tensor.half() if tensor.is_floating_point() else tensor
