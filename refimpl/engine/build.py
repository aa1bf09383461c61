"""From a configuration to the parts of an engine: model in its dtype, optimizer, stage, schedule, data, monitor.

The only place where names in a DeepSpeed JSON file become objects, and where parallel axes meet.
DeepSpeed's counterpart: the `_configure_*` methods of deepspeed/runtime/engine.py.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from refimpl.comm.axes import Axes
from refimpl.comm.group import Group
from refimpl.engine import arguments
from refimpl.engine.config import DeepSpeedConfig, load_config
from refimpl.engine.cut import counted_elsewhere, cut
from refimpl.engine.dataloader import make_dataloader
from refimpl.engine.experts import ExpertRanks, deal_out, refuse_unlike, same_experts
from refimpl.engine.homes import with_homes
from refimpl.engine.keys import ConfigError
from refimpl.engine.monitor import Monitor
from refimpl.engine.names import optimizer_named, schedule_named
from refimpl.engine.plus import with_plus
from refimpl.engine.sections import Optimizer as OptimizerSection
from refimpl.engine.sections import Scheduler as SchedulerSection
from refimpl.engine.sections import SparseAttention as SparseSection
from refimpl.measure.comms_log import CommsLog
from refimpl.model.patterns.named import pattern_named
from refimpl.model.sparse_swap import make_sparse
from refimpl.optim.travelling import Travelling
from refimpl.parallel.pipeline.module import PipelineModule
from refimpl.zero.ddp import DDP
from refimpl.zero.parameter import place
from refimpl.zero.stage import Stage
from refimpl.zero.unit import Unit, make_whole, unit_of, whole
from refimpl.zero.zero1 import Zero1
from refimpl.zero.zero2 import Zero2
from refimpl.zero.zero3 import Zero3

STAGES: tuple[Callable[..., Stage], ...] = (DDP, Zero1, Zero2, Zero3)
Parameters = Iterable[Tensor] | Iterable[dict[str, Any]]
MakeOptimizer = Callable[[list[Any]], Optimizer]
T = TypeVar("T")
ALIKE = ("zero_optimization", "gradient_accumulation_steps", "train_micro_batch_size_per_gpu", "train_batch_size")
LEAF_FLAG = "_z3_leaf"  # on a module that ZeRO-3 gathers whole; set by deepspeed.utils.set_z3_leaf_modules


@dataclass(frozen=True)
class Parts:
    """What an engine is made of. `stage.optimizer` is the optimizer."""

    config: DeepSpeedConfig
    axes: Axes
    model: nn.Module
    stage: Stage
    scheduler: Any | None  # whatever has step(), state_dict() and load_state_dict()
    dataloader: DataLoader[Any] | None
    monitor: Monitor

    @property
    def group(self) -> Group:
        """The ranks that the gradient is averaged over."""
        return self.axes.replicas


def build(
    model: nn.Module,
    config: Mapping[str, Any] | str | Path,
    axes: Axes,
    optimizer: Optimizer | MakeOptimizer | None = None,
    parameters: Parameters | None = None,
    dataset: Dataset[Any] | None = None,
    scheduler: Any | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    split: bool = False,
) -> Parts:
    """Every part, in the order in which they depend on each other. A caller's optimizer wins, as in DeepSpeed.

    split: `model` is this rank's part already.

    Without any optimizer the engine is for inference, and a schedule in the configuration has nothing to do.
    """
    group, rank = axes.replicas, axes.world.rank
    settings = load_config(config, world_size=axes.feeds, model=model, rank=rank)
    check_layout(settings, axes, isinstance(model, PipelineModule))
    check_agreed(settings, axes)
    if settings.comms_logger.enabled:
        log = settings.comms_logger
        axes.world.ledger.log = CommsLog(True, log.verbose, log.prof_all, log.prof_ops, log.debug)
    if settings.log_level is not None:
        logging.getLogger("refimpl").setLevel(settings.log_level)
    if settings.dump_state and rank == 0:
        print(settings.model_dump_json(indent=2))
    if settings.sparse_attention is not None:
        sparse(model, settings.sparse_attention, axes)
    ranks, shared = ExpertRanks(axes), settings.expert_parallel.autoep_size if settings.expert_parallel.enabled else 1
    named = None
    if not split and max(axes.model.size, shared) > 1 and not isinstance(model, PipelineModule):
        named = names_of(model, parameters, optimizer)
    if not split:
        example = first_batch(dataset, collate_fn) if dataset is not None and axes.tensor.size > 1 else None
        model = cut(model, axes, settings.tensor_parallel.partition_config, example)
    if shared > 1:
        deal_out(model, ranks, shared)
    place_model(model, settings, group.device)
    opt = None
    if optimizer is not None or settings.optimizer is not None:
        given = parameters if named is None else found_again(model, named)
        is_part = axes.pipeline.size > 1 or shared > 1
        opt = make_optimizer(optimizer, settings.optimizer, trainable(model, given, is_part))
    zero = settings.zero_config()
    flagged = tuple(path for path, module in model.named_modules() if getattr(module, LEAF_FLAG, False))
    zero = replace(zero, leaf_modules=(*zero.leaf_modules, *flagged))
    zero = with_plus(with_homes(zero, settings, group.device), settings)
    experts = same_experts(model, ranks)
    if ranks.made and axes.across.size > 1:
        raise ConfigError("zero_optimization.mics_shard_size: experts are not replicated over nodes; leave it out")
    axes = ranks.widest
    if settings.zero_optimization.stage == 3:
        refuse_unlike(model, experts, axes.expert)
    scaler = settings.loss_scaler()
    stage = STAGES[settings.zero_optimization.stage](model, opt, axes.shards, zero, scaler, experts)
    if axes.across.size > 1:
        stage.replicate(axes.across)
    if axes.model.size > 1:
        copies = counted_elsewhere(model, axes)
        check_whole(opt, axes, copies)
        stage.spans(axes.model, copies)
    loader = None
    if dataset is not None:
        micro_batch, drop_last = settings.train_micro_batch_size_per_gpu, settings.dataloader_drop_last
        loader = make_dataloader(dataset, micro_batch, axes.feed, axes.feeds, drop_last, collate_fn)
    schedule_ = None if opt is None else make_scheduler(scheduler, settings.scheduler, opt)
    return Parts(settings, axes, model, stage, schedule_, loader, Monitor(settings, rank))


def check_whole(optimizer: Optimizer | None, axes: Axes, copies: list[nn.Parameter]) -> None:
    """ConfigError for an optimizer that would see parts where it needs whole parameters. A collective of one kind.

    copies: see `counted_elsewhere`. A momentum that travels compressed would no longer be the same in all copies.
    """
    name, travels = type(optimizer).__name__, isinstance(optimizer, Travelling)
    if axes.tensor.size > 1 and (travels or getattr(optimizer, "layerwise", False)):
        raise ConfigError(
            f"optimizer.type {name}: tensor ranks have parts of the layers that it treats as wholes; "
            "set tensor_parallel.autotp_size to 1"
        )
    if travels and any(axes.model.all_gather_object(bool(copies))):
        raise ConfigError(
            f"optimizer.type {name}: pipeline stages that share a layer would not compress it alike; tie no layers"
        )


def sparse(model: nn.Module, section: SparseSection, axes: Axes) -> None:
    """Exchange the model's attention for the section's pattern. ConfigError where that cannot be."""
    if axes.context.size > 1:
        raise ConfigError("sparse_attention: with sequence_parallel_size > 1 no rank has the sequence's other blocks")
    if axes.tensor.size > 1 and section.different_layout_per_head:
        raise ConfigError(
            "sparse_attention.different_layout_per_head: tensor ranks have some heads each; set it to false"
        )
    options = {**section.model_dump(exclude={"mode"}), "seed": 0}  # the same draws on all ranks
    try:
        make_sparse(model, lambda heads: pattern_named(section.mode, heads, options))
    except ValueError as error:
        raise ConfigError(str(error)) from error


def check_agreed(config: DeepSpeedConfig, axes: Axes) -> None:
    """ConfigError on all ranks where they were given other configurations: they would wait for each other for ever."""
    said = axes.world.all_gather_object(config.model_dump(include=set(ALIKE), mode="json"))
    for key in ALIKE:
        values = [one[key] for one in said]
        if any(value != values[0] for value in values):
            each = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            raise ConfigError(f"{key} differs between ranks: {each}; give all of them the same configuration")


def first_batch(dataset: Dataset[Any], collate_fn: Callable[[list[Any]], Any] | None) -> Any:
    """Two samples as a micro-batch, to see what the model does with it; None of a stream."""
    if isinstance(dataset, IterableDataset):
        return None
    samples = [dataset[0], dataset[len(dataset) - 1]]  # type: ignore[arg-type]
    return (collate_fn or default_collate)(samples)


def check_layout(config: DeepSpeedConfig, axes: Axes, own_stages: bool) -> None:
    """ConfigError where the file asks for another layout than there is: a PipelineModule and an mpu have their own."""
    asked = {
        "pipeline.stages": (None if own_stages else config.pipeline.stages, axes.pipeline.size),
        "tensor_parallel.autotp_size": (config.tensor_parallel.autotp_size, axes.tensor.size),
        "sequence_parallel_size": (config.sequence_parallel_size, axes.context.size),
    }
    wrong = [(key, size, there) for key, (size, there) in asked.items() if (size or 1) > 1 and size != there]
    if config.data_parallel_size not in (None, axes.feeds):
        wrong.append(("data_parallel_size", config.data_parallel_size, axes.feeds))
    if (shard := config.zero_optimization.mics_shard_size) > 0 and shard != axes.shards.size:
        wrong.append(("zero_optimization.mics_shard_size", shard, axes.shards.size))
    if wrong:
        raise ConfigError(
            "\n".join(f"{key} = {size}, but the ranks are laid out with {there}" for key, size, there in wrong)
        )


def place_model(model: nn.Module, config: DeepSpeedConfig, device: torch.device) -> None:
    """Move `model` to `device`, in place; the stage casts its parameters. Buffers keep their dtype, as in 0.19 (#8066).

    What `zero.Init` sharded is moved one unit at a time, and made whole for the stages that keep whole parameters.
    """
    sharded = {p: unit for p in model.parameters() if (unit := unit_of(p)) is not None}
    if config.zero_optimization.stage < 3:
        make_whole(list(sharded))
    else:
        for unit in dict.fromkeys(sharded.values()):  # in the same order on every rank, as a set would not be
            if unit.device != device:
                with whole(unit.params):
                    for p in unit.params:
                        place({p: p.data.to(device)}, nn.Parameter)
                    Unit(unit.params, unit.group, name=unit.name)
    model.to(device)
    if (cast := config.zero_config().dtype) is not None:
        for module in model.modules():
            if isinstance(module, _BatchNorm | _InstanceNorm):  # torch has no kernel for two dtypes of these
                for name, buffer in module.named_buffers(recurse=False):
                    if buffer.is_floating_point():
                        module.register_buffer(name, buffer.to(cast))
    if (dtype := config.data_types.buffer_dtype) is not None:
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.data = buffer.data.to(dtype)


def names_of(model: nn.Module, parameters: Parameters | None, optimizer: Any) -> list[dict[str, Any]]:
    """What is to be optimized, in groups, by its names in the model before it is cut."""
    if isinstance(optimizer, Optimizer):
        raise ConfigError(
            "optimizer: its tensors are the whole model's, of which each rank keeps a part: give a callable that makes "
            "one of the parameters it is called with, or `optimizer` in the configuration"
        )
    names = {p: name for name, p in model.named_parameters()}
    return [{**group, "params": [names[p] for p in group["params"]]} for group in trainable(model, parameters)]


def found_again(model: nn.Module, named: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same groups of what this rank has of them."""
    whole = model.name_in_whole if isinstance(model, PipelineModule) else str
    here = {whole(name): p for name, p in model.named_parameters(remove_duplicate=False)}
    here |= {model.first_of(p): p for p in model.repeated} if isinstance(model, PipelineModule) else {}
    return [{**group, "params": [here[name] for name in group["params"] if name in here]} for group in named]


def trainable(model: nn.Module, parameters: Parameters | None, is_stage: bool = False) -> list[Any]:
    """The tensors or parameter groups to optimize; all of the model's by default. Frozen ones wait to be unfrozen.

    is_stage: others may have all that is trained, as pipeline stages and ranks with other experts.

    ValueError when one of them is not a parameter of `model`: its gradient would never be reduced.
    """
    known = set(model.parameters())
    given = list(model.parameters()) if parameters is None else list(parameters)
    groups = [dict(g) for g in given if isinstance(g, dict)] or [{"params": given}]
    for number, group in enumerate(groups):
        tensors = group["params"]
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        for tensor in tensors:
            if tensor not in known:
                shape = tuple(tensor.shape)
                raise ValueError(f"model_parameters: group {number} has a tensor {shape} that `model` does not have")
        group["params"] = tensors
    if not is_stage and not any(tensor.requires_grad for group in groups for tensor in group["params"]):
        raise ValueError("model_parameters: nothing to train; every parameter has requires_grad=False")
    return groups


def make_optimizer(
    client: Optimizer | MakeOptimizer | None, section: OptimizerSection | None, parameters: list[Any]
) -> Optimizer:
    """The caller's optimizer, or what its callable makes of `parameters`, or the one that the file names."""
    if isinstance(client, Optimizer):
        return client
    if client is not None:
        made = client(parameters)
        if not isinstance(made, Optimizer):
            raise TypeError(f"optimizer: the callable returned {type(made).__name__}, not a torch.optim.Optimizer")
        return made
    assert section is not None
    return named_optimizer(section.type, parameters, section.params)


def named_optimizer(name: str, parameters: list[Any], params: Mapping[str, Any]) -> Optimizer:
    """An optimizer by DeepSpeed's or torch's name; `names.optimizer_named` says what the names mean."""
    make, options = optimizer_named(name, params)
    return checked("optimizer", make, parameters, options)


def make_scheduler(client: Any | None, section: SchedulerSection | None, optimizer: Optimizer) -> Any | None:
    """The caller's schedule, or what its callable makes of the optimizer, or the one that the file names, or None.

    ValueError for two schedules: DeepSpeed then drops the caller's without a word.
    """
    if client is not None and section is not None:
        raise ValueError("lr_scheduler: given twice, as an argument and as `scheduler` in config; keep one")
    if client is not None:
        return client(optimizer) if callable(client) else client
    if section is None:
        return None
    return checked("scheduler", schedule_named(section.type), optimizer, section.params)


def checked(section: str, make: Callable[..., T], first: Any, params: Mapping[str, Any]) -> T:
    """make(first, **params), after a check of the parameters. ConfigError names the parameter, else the section."""
    values = arguments.read(section, make, params)
    try:
        return make(first, **values)
    except Exception as error:  # whatever a class of torch has to say about its arguments
        raise ConfigError(f"{section}.params: {getattr(make, '__name__', make)}: {error}") from error
