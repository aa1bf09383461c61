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
- The fp32 masters begin with the weights that `initialize` was given; DeepSpeed's with what bf16 or fp16 has left of
  them, so that from one seed bf16 weights differ in their last bit from the first update on.
- A micro-batch's gradient is divided where it arrives, in its dtype; DeepSpeed divides the loss. The bits are the same
  where gradient_accumulation_steps is a power of two; fp16's loss scale settles that many times lower.
- Sums in `data_types.grad_accum_dtype` travel in it; DeepSpeed's in the model's, or in communication_data_type.
- A gradient that is not finite on any rank skips the update on all, in every stage and dtype.
- A parameter of which no rank has a gradient stays as it is, its moments and count of steps too, as under torch.
  DeepSpeed updates it: with zeros, so that momentum and weight decay go on; stage 3 with its last gradient again.
- `get_global_grad_norm` is a number after every step, in every stage and dtype. (DeepSpeed 0.19.8: inf after a step
  that was skipped, None at stage 0 in fp32.)
"""

import gc
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from refimpl.activation.checkpoint import Checkpoint
from refimpl.comm.streams import sent
from refimpl.engine import checkpoint
from refimpl.engine.activations import checkpointer
from refimpl.engine.assemble import parts_of
from refimpl.engine.autotuning import Trial
from refimpl.engine.build import Parts
from refimpl.engine.compressed import Clock
from refimpl.engine.dataloader import RepeatingLoader
from refimpl.engine.precision import autocast, dtypes_told, in_half
from refimpl.engine.python_gc import COLLECTOR
from refimpl.engine.report import Report, mean_loss
from refimpl.engine.saved import Saved
from refimpl.engine.saving.module_state import ModuleState
from refimpl.measure.flops import FORWARD, FlopsProfiler
from refimpl.measure.throughput import ThroughputTimer
from refimpl.zero.norm import GradNorm, shown


class Engine(Saved, ModuleState):
    """Trains `module` as the configuration says. Made by `initialize`, on every rank alike.

    Its counters are those of `TrainingState`. `group.ledger` holds the collectives since the first forward after the
    last update.
    """

    mpu: Any = None  # who says how ranks share the model: deepspeed.initialize's argument, or a PipelineModule's grid

    def __init__(self, args: Parts | Any = None, *others: Any, **named: Any) -> None:
        """`args`: the parts; or all arguments are those of DeepSpeed's engine, as a script's own subclass hands on."""
        parts = args if isinstance(args, Parts) else parts_of(args, *others, **named)
        super().__init__(parts)
        self.mpu = named.get("mpu")
        self.report, self.monitor = Report(parts), parts.monitor
        self.tput_timer = ThroughputTimer()
        self.device = self.group.device
        self.local_rank = int(os.environ.get("LOCAL_RANK", self.axes.world.rank))
        self._step_applied = False
        self.trial = Trial(parts.config.autotuning, self.device, self.axes.world.rank)
        self.resume_python_gc: Callable[[], object] | None = None
        self.compressed = Clock(parts.model, parts.config.compression_training)
        self._tell_time()
        if parts is not args:  # `initialize` does it last: an engine that a subclass of ours refuses leaves it on
            self.pause_python_gc()

    @cached_property
    def activation_checkpoint(self) -> Checkpoint:
        """For the model's own use: engine.activation_checkpoint(block, x)."""
        return checkpointer(self._config.activation_checkpointing, self.axes.tensor, self.axes.world.rank)

    @property
    def flops_profiler(self) -> FlopsProfiler | None:
        """What has counted, on rank 0, if the configuration's `flops_profiler` asked for it; None before."""
        return self.report.profiler

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
        if not self._open_micro_batches:
            self.group.ledger.reset()
        self._tell_time()  # to layers that init_compression has made since
        inputs, kwargs = in_half(self._config, (inputs, kwargs))
        if self.training and not self._pending:  # a step's time begins at its first micro-batch
            self.tput_timer.start()
        if self.module.training:
            kwargs |= self.told.at(self.global_steps)
        counting = self.report.flops(self.module, self.global_steps, FORWARD)
        told = dtypes_told(self._config, self.module, inputs, kwargs)
        with self.report.time("fwd"), counting, autocast(self._config, self.device), told:
            return self.module(*inputs, **kwargs)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Add the gradient of loss / gradient_accumulation_steps (of loss, if not `scale_wrt_gas`); return `loss`.

        loss: a scalar with a graph, ValueError otherwise. The gradient is averaged over ranks by the time it is used.
        If backward raises, as where memory ends, the gradients since the last update are dropped: a new batch begins.
        `engine.scale_wrt_gas`, where a client sets it, says so for all calls, as in DeepSpeed.
        """
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"engine.backward: the loss must be a scalar tensor, not {what}")
        if not loss.requires_grad:
            raise ValueError(
                "engine.backward: the loss has no graph: it was detached, or computed in no_grad(), or nothing that it "
                "is made of requires a gradient"
            )
        self._pending += 1
        self.report.loss(loss)
        gradients = self.stage.gradients
        is_mean = scale_wrt_gas if self.scale_wrt_gas is None else self.scale_wrt_gas
        gradients.divisor = self.gradient_accumulation_steps() if is_mean else 1
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
        RuntimeError where it would update inside `no_sync`.
        """
        due = self.is_gradient_accumulation_boundary() or not self._config.managed_gradient_accumulation
        if due and not self._syncing:
            raise RuntimeError(
                "engine.step() inside no_sync() or coalesce_grad_reduction(): the gradients are not reduced; leave the "
                "block first"
            )
        if due:
            checkpoint.hear(self)
        self._count_step()
        self._step_applied = False
        if not due:
            self.tput_timer.stop()
            return
        self.compressed.check()
        self.report.before_update()
        micro_batches = self._take_micro_batches()  # also if the step raises: its gradients are gone
        with self.report.time("step"):
            self._step_applied = self.stage.step()
        if self._step_applied and self.lr_scheduler is not None:
            self.lr_scheduler.step(**(lr_kwargs or {}))
        self.global_steps += 1
        samples = micro_batches * self.train_micro_batch_size_per_gpu() * self.axes.feeds
        self.global_samples += samples
        self.tput_timer.stop(samples)
        self._tell_time()
        self.trial.after_update(self.global_steps, self.global_samples)
        self.report.after_update(self.global_steps, self.global_samples, self.get_lr)

    def _backward_epilogue(self) -> None:
        """Nothing: DeepSpeed's recipe for one loss of several engines calls it between `loss.backward()` and `step`."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients since the last update. Micro-batches stay counted, as in DeepSpeed."""
        self.stage.zero_grad()

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """One optimizer step over gradient_accumulation_steps micro-batches; the mean loss over them and all ranks.

        From `data_iter`, or over and over from the training data. A tuple or list is the model's arguments, a mapping
        its keywords, a tensor its only argument; tensors are moved to the engine's device. -> fp32 scalar, detached.
        Where the data ends inside a batch, or anything fails, what was begun of it is dropped.
        """
        self.train()
        try:
            losses = [self.backward(self._feed(data_iter)).detach() for _ in range(self.gradient_accumulation_steps())]
        except BaseException:
            self._drop_batch()
            raise
        self.step()
        return mean_loss(self.group, losses)

    @torch.no_grad()
    def eval_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """The mean loss of as many micro-batches as `train_batch` takes, in evaluation mode, without a gradient."""
        with self._evaluating():
            losses = [self._feed(data_iter) for _ in range(self.gradient_accumulation_steps())]
        return mean_loss(self.group, losses)

    # What it is and how it fares.

    @property
    def skipped_steps(self) -> int:
        """Updates skipped because some rank had a gradient that was not finite."""
        return self.stage.skipped_steps

    def was_step_applied(self) -> bool:
        """Whether the last `step` changed the weights."""
        return self._step_applied

    def get_global_grad_norm(self) -> GradNorm | None:
        """L2 norm of the last step's gradient over all ranks, before clipping, unscaled; None before the first step.

        Where fp16's loss scale has skipped that step, of the last one that it did not; before there is one, 0.
        """
        return shown(self.stage.shown_norm)

    def get_lr(self) -> list[float | None]:
        """The learning rate of each parameter group; None where the optimizer finds one by itself (Adafactor)."""
        rates = [group.get("lr") for group in self.stage.optimizer.param_groups]
        return [None if rate is None else float(rate) for rate in rates]

    def get_mom(self) -> list[Any]:
        """The momentum, or Adam's betas, of each parameter group; 0.0 where the optimizer has neither."""
        groups = self.stage.optimizer.param_groups
        return [g["momentum"] if g.get("use_muon") else g.get("betas", g.get("momentum", 0.0)) for g in groups]

    def destroy(self) -> None:
        """Let go of model and optimizer: another engine may have them. Stage 3 leaves the model in shards.

        Waits for a save that is under way: a collective then, and CheckpointError on every rank if it failed on one.
        """
        if self.saving.unheard:
            checkpoint.wait(self)
        self.stage.release(in_shards=True)
        if self.resume_python_gc is not None:
            self.resume_python_gc()

    def pause_python_gc(self) -> None:
        """Until `destroy`, if the configuration says `disable_python_gc`."""
        if self._config.disable_python_gc:
            self.resume_python_gc = COLLECTOR.pause(self)

    def collect_python_gc(self) -> int:
        """Look for garbage in cycles now, as with `disable_python_gc` nobody else does. How many objects went."""
        return gc.collect()

    def empty_partition_cache(self) -> None:
        """Free the parameters that stage 3 has gathered ahead or kept for their next use."""
        self.stage.free_gathered()

    def compile(
        self,
        backend: str = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """torch.compile the model in place. NotImplementedError for DeepCompile's schedule, and compiled autograd."""
        if schedule is not None or compiled_autograd_enabled:
            raise NotImplementedError("engine.compile: schedule, compiled_autograd_enabled: not part of this project")
        self.module.compile(backend=backend, **(compile_kwargs or {}))

    # Inside.

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Evaluation mode for a block, and after it the mode from before, also when the data ends in it."""
        training = self.module.training
        self.eval()
        try:
            yield
        finally:
            self.train(training)

    def _forget_micro_batches(self) -> None:
        super()._forget_micro_batches()
        self.report.forget()
        self._tell_time()  # a checkpoint may have been loaded

    def _tell_time(self) -> None:
        """Layers under `compression_training` count the updates that changed the weights."""
        self.compressed.tell(self.global_steps - self.skipped_steps)

    def _feed(self, data_iter: Iterator[Any] | None) -> Tensor:
        """The model's loss on the next micro-batch."""
        if data_iter is None:
            if self.training_dataloader is None:
                raise ValueError("no data: pass data_iter=..., or training_data=... to initialize")
            self._batches = self._batches or RepeatingLoader(self.training_dataloader)
            data_iter = self._batches
        try:
            batch = tree_map_only(Tensor, lambda tensor: sent(tensor, self.device), next(data_iter))
        except StopIteration:
            words = f"the data ended: a batch takes {self.gradient_accumulation_steps()} micro-batches"
            raise StopIteration(f"{words}, and one found none") from None
        args, kwargs = ((), batch) if isinstance(batch, Mapping) else (batch, {})
        loss: Tensor = self(*(args if isinstance(args, tuple | list) else (args,)), **kwargs)
        return loss
