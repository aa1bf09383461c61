"""The engine of a `PipelineModule`: whole batches only, since no rank has a loss of its own to go backward from.

    engine, _, _, _ = refimpl.initialize(model=PipelineModule(...), training_data=..., config=...)
    loss = engine.train_batch()       # or train_batch(data_iter), whose items are (inputs, labels)

One walk, `train_batch`: micro-batches -> `PipelineModule.forward_backward` (gradients of all of them, shared ones
summed) -> the replicas' mean, at the end of the stage's backward pass -> `Engine.step`.
`engine.group` are the replicas of this rank's layers: the batch triple, the data and ZeRO are of those. The gradient's
norm, clipping and a skipped step are of all stages. ZeRO stages 0 and 1: from 2 on each micro-batch would be reduced.
Data is used on ranks that hold the first or the last stage; the others may be given no iterator. One that is given is
read there too, so that where it ends it ends for all, and no rank waits for another's micro-batch.
DeepSpeed: deepspeed/runtime/pipe/engine.py, whose checkpoints have a file a layer.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from refimpl.comm.streams import sent
from refimpl.engine.build import Parts
from refimpl.engine.dataloader import RepeatingLoader
from refimpl.engine.engine import Engine
from refimpl.engine.precision import in_half
from refimpl.engine.report import mean_loss
from refimpl.parallel.pipeline.module import PipelineModule

Batch = tuple[Any, Any]


class PipelineError(RuntimeError):
    """A call that a pipeline has no answer to."""


class Instructions(dict[type, Callable[..., object]]):
    """Where DeepSpeed's engine looks up what an instruction of its schedule does. Here there is nothing to replace."""

    def __setitem__(self, instruction: type, does: Callable[..., object]) -> None:
        """NotImplementedError."""
        raise NotImplementedError(
            f"PipelineEngine._INSTRUCTION_MAP[{instruction.__name__}]: this engine runs the tables of refimpl.parallel."
            "pipeline.schedules, and no other code in an instruction's place. For updates in backward, as of "
            "diffusion-pipe's gradient_release: leave them out; the engine's step updates"
        )


class PipelineEngine(Engine):
    """Trains a PipelineModule as the configuration says. Made by `initialize`, on every rank alike."""

    module: PipelineModule
    _INSTRUCTION_MAP = Instructions()

    def __init__(self, parts: Parts) -> None:
        """NotImplementedError for ZeRO stages 2 and 3."""
        super().__init__(parts)
        refuse_stage(parts)
        for p, name in self.stage.names.items():
            self.stage.names[p] = self.saved_name(name)
        if interval := self._config.pipeline.activation_checkpoint_interval:
            self.module.checkpoint_interval = interval
        self.batch_fn: Callable[[Any], Any] | None = None
        self._evaluated: int | None = None  # what a script wrote to `micro_batches`

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """One optimizer step over gradient_accumulation_steps micro-batches a replica; their mean loss, on all ranks.

        Each item of `data_iter`, or of the training data, is (inputs, labels). -> fp32 scalar, detached. ValueError
        while `micro_batches` is another number than a step's.
        """
        if self.micro_batches != (number := self.gradient_accumulation_steps()):
            raise ValueError(
                f"engine.micro_batches is {self.micro_batches}, and a step has {number}: write that back, or say "
                "set_train_batch_size"
            )
        self.train()
        self.group.ledger.reset()
        self._grow()
        inputs, labels = self._micro_batches(data_iter, number)
        self.tput_timer.start()
        what = f"forward and backward of {number} micro-batches through this rank's stages"
        counting = self.report.flops(self.module, self.global_steps, what)
        with counting, self.stage.passes.explicit(), self.stage.no_sync():
            # The stage divides what arrives by the number of micro-batches, as in every engine.
            losses = self.module.forward_backward(inputs, labels, scale=float(self.stage.scale(torch.ones(()))))
        for loss in losses:
            self.report.loss(loss)
        self._pending = len(inputs)
        super().step(self._told())
        return mean_loss(self.group, list(losses))

    def _told(self) -> dict[str, int]:
        """What the schedule's `step` is told: Megatron's asks for an update's samples, which nobody passes here."""
        schedule = self.lr_scheduler
        asks = schedule is not None and "increment" in inspect.signature(schedule.step).parameters
        return {"increment": self.train_batch_size()} if asks else {}

    def eval_batch(
        self,
        data_iter: Iterator[Any] | None = None,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """The mean loss, on all ranks, in evaluation mode, of `num_micro_batches`, by default `micro_batches`.

        compute_loss=False: the last stage's outputs, a list, on the ranks that hold it, None on the others; labels are
        not read. return_logits: (that, what the last stage said of the last micro-batch; None on other ranks).
        bcast_loss changes nothing. NotImplementedError for a loss with another reduce_output than "avg".
        """
        if compute_loss and reduce_output != "avg":
            raise NotImplementedError(f"eval_batch: reduce_output {reduce_output!r} of a loss: only 'avg'")
        self._grow()
        with self._evaluating():
            inputs, labels = self._micro_batches(data_iter, num_micro_batches or self.micro_batches)
            said: list[Any] = []
            if compute_loss:
                losses = self.module.evaluate(inputs, labels, hear=said.append)
                found: Any = mean_loss(self.group, list(losses))
            else:
                said = list(self.module.pipeline(len(inputs)).evaluate(inputs).values())
                found = said or None
        return (found, said[-1] if said else None) if return_logits else found

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """Micro-batches come from here from now on, over and over."""
        self._batches = RepeatingLoader(loader)

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Micro-batches come from here from now on."""
        self._batches = iterator

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """What makes (inputs, labels) of an item of the data."""
        self.batch_fn = fn

    def set_has_attention_mask(self, value: bool) -> None:
        """Nothing is done: a mask, of booleans or not, travels as any other tensor that has no gradient."""

    @property
    def micro_batches(self) -> int:
        """What `eval_batch` reads: as many micro-batches as a step, or the number that a script has written here."""
        return self._evaluated or self.gradient_accumulation_steps()

    @micro_batches.setter
    def micro_batches(self, number: int) -> None:
        self._evaluated = None if number == self.gradient_accumulation_steps() else number

    @property
    def num_stages(self) -> int:
        """Ranks that a micro-batch passes."""
        return self.module.group.size

    @property
    def stage_id(self) -> int:
        """This rank's place among them."""
        return self.module.group.rank

    def get_pipeline_parallel_rank(self) -> int:
        """The same."""
        return self.stage_id

    @property
    def is_pipe_parallel(self) -> bool:
        """Whether there are several."""
        return self.num_stages > 1

    def is_first_stage(self) -> bool:
        """Whether this rank holds the layers that read the inputs."""
        return 0 in self.module.stages

    def is_last_stage(self) -> bool:
        """Whether this rank holds the layers that the loss is made of."""
        return self.module.last_stage in self.module.stages

    def reset_activation_shape(self) -> None:
        """The next batch may have other shapes. On every rank."""
        for pipeline in self.module.pipelines.values():
            pipeline.reset_shapes()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """PipelineError."""
        raise PipelineError("a pipeline is trained by train_batch() and evaluated by eval_batch(), not by forward()")

    def backward(self, *args: Any, **kwargs: Any) -> Tensor:
        """PipelineError."""
        raise PipelineError("a pipeline is trained by train_batch(), which goes backward too; there is no backward()")

    def step(self, *args: Any, **kwargs: Any) -> None:
        """PipelineError."""
        raise PipelineError("a pipeline is trained by train_batch(), which steps too; there is no step()")

    def saved_name(self, name: str) -> str:
        """As `PipelineModule.name_in_whole`."""
        return self.module.name_in_whole(name)

    def copies(self) -> dict[nn.Parameter, str]:
        """Shared weights that an earlier stage has: their names there."""
        return {p: self.saved_name(name) for p, name in self.module.first_names.items()}

    def _grow(self) -> None:
        """Agree on shapes anew where this step's difficulty is another: who cuts the sequences asks for it, too."""
        if self.told.grows(self.global_steps):
            self.reset_activation_shape()

    def _micro_batches(self, data_iter: Iterator[Any] | None, number: int) -> tuple[list[Any], list[Any]]:
        """The inputs and the labels of this rank's next micro-batches; None for each where no stage uses them."""
        used = self.is_first_stage() or self.is_last_stage()
        source = data_iter if data_iter is not None else self._batches
        if not used and (source is None or isinstance(source, RepeatingLoader)):  # without an end
            return [None] * number, [None] * number
        if source is None:
            if self.training_dataloader is not None:
                source = self._batches = RepeatingLoader(self.training_dataloader)
            elif self.batch_fn is not None:
                source = repeat(None)  # it gets them: Megatron's from the first of its tensor-parallel ranks
            else:
                raise ValueError("no data: pass data_iter=..., set_dataloader(...), or training_data=... to initialize")
        pairs: list[Batch] = []
        try:
            while len(pairs) < number:
                item = next(source)
                pairs.append(self._pair(item) if used else (None, None))
        except StopIteration:
            raise StopIteration(f"the data ended after {len(pairs)} of a batch's {number} micro-batches") from None
        return [inputs for inputs, _ in pairs], [labels for _, labels in pairs]

    def _pair(self, item: Any) -> Batch:
        item = self.batch_fn(item) if self.batch_fn else item
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise ValueError(
                f"a pipeline's data must be pairs (inputs, labels), not {type(item).__name__}: set_batch_fn"
            )
        pair: Batch = tree_map_only(Tensor, lambda x: sent(x, self.device), tuple(item))
        pair = in_half(self._config, pair[0]), pair[1]
        return pair if self.module.part is None else self.module.part(pair)


def refuse_stage(parts: Parts) -> None:
    """ZeRO-2 and 3 cannot wait for the last micro-batch. Nor is a stage's forward run under autocast."""
    if parts.config.torch_autocast.enabled:
        raise NotImplementedError("torch_autocast.enabled: not with a pipeline: enable bf16 or fp16")
    if parts.config.progressive_layer_drop.enabled:
        raise NotImplementedError("progressive_layer_drop.enabled: not with a pipeline: its stages are told nothing")
    if (number := parts.config.zero_optimization.stage) > 1:
        raise NotImplementedError(
            f"ZeRO stage {number} with a pipeline: it would reduce, or gather, for every micro-batch; use stage 0 or 1"
        )
