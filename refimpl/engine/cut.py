"""A model cut along the axes: what this rank keeps of it. Every rank comes with the whole model and leaves with a part.

    tensor     matrices and vocabulary by a plan, `parallel/swap.py`, or by one that is found, `parallel/autotp.py`
    context    attention over the ranks' tokens, the loss a mean over tokens, `parallel/context`
    pipeline   layers, `parallel/pipeline/module.py`

In this order: layers are split before they are dealt out. A model of several axes is the same model: names, initial
weights, inputs and loss are those of the whole one. Tensor ranks take any model, the other two the GPT; a
`PipelineModule` comes cut already, and with `mpu` a model may be cut by whoever wrote it.
"""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from refimpl.comm.axes import Axes
from refimpl.compress.weights.layers import Compressed
from refimpl.engine.alike import compare_first_batch
from refimpl.engine.configuration.keys import ConfigError
from refimpl.model.gpt import GPT
from refimpl.model.moe import WithRouting, layers
from refimpl.parallel.auto.partition import partition_plan
from refimpl.parallel.autotp import autotp, common_numbers
from refimpl.parallel.conjugates import gather
from refimpl.parallel.context.layout import Layout
from refimpl.parallel.context.loss import TokenMean
from refimpl.parallel.context.swap import context_parallel
from refimpl.parallel.pipeline.gpt import gpt_layers, gpt_names
from refimpl.parallel.pipeline.module import PipelineModule
from refimpl.parallel.split import Split
from refimpl.parallel.styles import Plan, gpt_plan
from refimpl.parallel.swap import called, parallelize
from refimpl.parallel.tensor import cuts
from refimpl.zero.agreement.beyond import Spans
from refimpl.zero.gather.unit import unit_of

# Of a model: what was asked for by deepspeed.tp_model_init.
AUTOTP_SIZE, AUTOTP_DTYPE, AUTOTP_RANKS = "_autotp_size", "_autotp_dtype", "_autotp_ranks"
OTHERS_FLAGS = ("model_parallel", "tensor_model_parallel")  # of Megatron's and DeepSpeed's users


def cut(model: nn.Module, axes: Axes, partition: Mapping[str, Any] | None = None, example: Any = None) -> nn.Module:
    """This rank's part of `model`, cut in place; a collective. ConfigError for a model that cannot be cut so.

    partition, example: for `autotp`, see there.
    """
    if isinstance(model, PipelineModule):
        return model
    refuse(model, axes)
    if axes.tensor.size > 1:
        by_tensor(model, axes, partition, example)
        compare_first_batch(model, axes.tensor)
    part = by_context(model, axes) if axes.context.size > 1 and isinstance(model, GPT) else None
    if axes.pipeline.size > 1:
        assert isinstance(model, GPT)
        return by_layers(model, axes, part)
    if isinstance(model, GPT) and max(axes.tensor.size, axes.context.size) > 1:
        model.register_forward_pre_hook(partial(of_this_rank, part), with_kwargs=True)
        model.register_forward_hook(partial(whole_logits, axes))
    return model


def refuse(model: nn.Module, axes: Axes) -> None:
    """ConfigError for what a cut would lose, or cannot reach."""
    kind = type(model).__name__
    hooks = model._forward_hooks or model._forward_pre_hooks
    if axes.pipeline.size > 1 and (type(model) is not GPT or hooks):
        what = "has hooks, which its stages would not call" if type(model) is GPT else "is no chain of layers"
        raise ConfigError(
            f"pipeline.stages = {axes.pipeline.size}: a {kind} that {what}; give initialize a PipelineModule(layers, "
            "num_stages=..., loss_fn=...)"
        )
    if axes.model.size > 1 and any(unit_of(p) is not None for p in model.parameters()):
        raise ConfigError(
            f"{kind} was built in zero.Init, in shards, and layers are split and dealt out whole: build it without"
        )
    if axes.tensor.size > 1 and cuts(model):
        raise ConfigError(f"tensor_parallel.autotp_size: this {kind} is cut already; build it anew")
    if axes.tensor.size > 1 and any(isinstance(module, Compressed) for module in model.modules()):
        raise ConfigError(
            "tensor_parallel.autotp_size: not with compression_training, whose layers would be lost: take one out"
        )


def of_this_rank(part: Callable[[Any], Any] | None, model: nn.Module, args: Any, kwargs: Any) -> Any:
    """What the model is called with, of which a context rank takes its tokens."""
    return (args, kwargs) if part is None else part((args, kwargs))


def whole_logits(axes: Axes, model: GPT, args: Any, out: Tensor) -> Tensor:
    """A loss as it is; logits with all of the vocabulary. ValueError for their gradient over context ranks."""
    if out.dim() == 0:
        return out
    if axes.tensor.size > 1:
        vocab = model.config.vocab
        out = gather(out, axes.tensor, split=Split((vocab,), vocab, axes.tensor.size, "vocabulary"))
    if axes.context.size > 1:
        if out.requires_grad:
            raise ValueError("logits over context ranks have no gradient: call the model with targets, or in no_grad")
        layout = Layout(model.config.context, axes.context.size, zigzag=True)
        parts = out.new_empty(axes.context.size, *out.shape)
        axes.context.all_gather(parts, out.contiguous(), tag="logits")
        out = layout.join(list(parts))
    return out


def by_tensor(model: nn.Module, axes: Axes, partition: Mapping[str, Any] | None, example: Any) -> None:
    """Split the layers: the GPT's by its plan, another model's by what one run of it shows.

    Random numbers from now on are the same on all tensor ranks, where tensors are whole.
    """
    model.to(axes.world.device)
    try:
        if isinstance(model, GPT) and partition is None:
            common_numbers(model, axes.tensor)
            parallelize(model, with_mixtures(model, gpt_plan(model.config.heads, model.config.vocab)), axes.tensor)
            return
        plan = None if partition is None else partition_plan(model, partition)
        report = autotp(model, axes.tensor, example, plan=plan)
    except ValueError as error:
        key = "autotp_size" if partition is None else "partition_config"
        raise ConfigError(f"tensor_parallel.{key}: {error}") from error
    if axes.world.rank == 0:
        logging.getLogger("refimpl").info("tensor parallelism:\n%s", report)


def with_mixtures(model: GPT, plan: Plan) -> Plan:
    """The plan for what is left of the MLPs, and of the loss, where mixtures took their place."""
    if not layers(model):
        return plan
    if isinstance(model.loss, WithRouting):
        plan = {("loss.loss" if pattern == "loss" else pattern): style for pattern, style in plan.items()}
    names = [name for name, _ in model.named_modules()]
    return {pattern: style for pattern, style in plan.items() if any(called(name, pattern) for name in names)}


def by_context(model: GPT, axes: Axes) -> Callable[[Any], Any]:
    """Ring attention, zigzag; `model(tokens, targets)` takes whole sequences still. -> what cuts a batch."""
    group = axes.context
    layout = Layout(model.config.context, group.size, zigzag=True)
    context_parallel(model, group, layout)
    model.loss = TokenMean(model.loss, axes.replicas)
    return partial(part_of_tokens, layout=layout, rank=group.rank)


def part_of_tokens(batch: Any, layout: Layout, rank: int) -> Any:
    """This rank's columns of every tensor [B, T, ..] in a batch. ValueError for sequences of another length."""

    def part(x: Tensor) -> Tensor:
        if x.dim() < 2 or x.shape[1] != layout.length:
            raise ValueError(
                f"a tensor {tuple(x.shape)} in a batch: over {layout.ranks} context ranks sequences must have the "
                f"model's {layout.length} tokens along dimension 1"
            )
        return layout.cut(x, rank)

    return tree_map_only(Tensor, part, batch)


def by_layers(model: GPT, axes: Axes, part: Callable[[Any], Any] | None) -> PipelineModule:
    """A stage for each pipeline rank, under 1F1B. ConfigError for losses of mixtures that it cannot add."""
    chain = gpt_layers(model)
    sizes = torch.tensor([sum(p.numel() for p in layer.parameters()) for layer in chain], device=axes.world.device)
    axes.tensor.all_reduce(sizes)  # parts may differ by a head: all tensor ranks must cut at the same layers
    stage = PipelineModule(
        chain, axes.pipeline, model.loss, axes=axes, names=gpt_names(chain), part=part, partition=sizes.tolist()
    )
    if isinstance(model.loss, WithRouting):
        model.loss.mixtures = ()  # each stage has its own; these would keep the others' weights alive
        return stage
    has_mixtures = axes.pipeline.all_gather_object(bool(layers(stage)))
    if any(has_mixtures[:-1]) and (lost := routing_losses(model.loss)):
        raise ConfigError(
            f"pipeline.stages = {axes.pipeline.size}: the mixtures' losses are inside a {type(model.loss).__name__}, "
            f"which the last stage alone computes, and other stages' would be lost ({lost}): set both to 0, and "
            "balance the experts with Routing(bias=True)"
        )
    return stage


def routing_losses(loss: nn.Module) -> str:
    """What mixtures add to this loss; empty if nothing."""
    found = [
        f"balance={m.balance}, z={m.z}" for m in loss.modules() if isinstance(m, WithRouting) and (m.balance or m.z)
    ]
    return ", ".join(found)


def counted_elsewhere(model: nn.Module, axes: Axes) -> dict[nn.Parameter, Spans | None]:
    """Copies that another rank of this replica has and counts: where the norm, and what is saved, are of each once.

    Of a layer that several stages use the first stage's counts; of what tensor ranks all have whole, rank 0's; of heads
    of keys that several have, the first one's. A model cut by others says which parameters are parts by their attribute
    `model_parallel` or `tensor_model_parallel`. -> which elements of each, laid out flat; None: all.
    """
    found = dict[nn.Parameter, Spans | None]()
    parts, rank = cuts(model), axes.tensor.rank
    for p in model.parameters() if rank > 0 else ():
        if p not in parts:
            found |= {} if any(getattr(p, flag, False) for flag in OTHERS_FLAGS) else {p: None}
        elif rank % parts[p][0].copies:
            split, dim, _ = parts[p]
            row = p.numel() // p.shape[dim]
            found[p] = tuple((span.start * row, span.stop * row) for span in split.copied(rank))
    return found | (dict.fromkeys(model.repeated) if isinstance(model, PipelineModule) else {})
