"""From a configuration to the parts of an engine: model in its dtype, optimizer, stage, schedule, data, monitor.

The only place where names in a DeepSpeed JSON file become objects, and where parallel axes meet.
DeepSpeed's counterpart: the `_configure_*` methods of deepspeed/runtime/engine.py.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from refimpl.checkpoint.errors import together
from refimpl.comm.axes import Axes
from refimpl.comm.group import Group
from refimpl.engine.config import load_config
from refimpl.engine.configuration.keys import ConfigError
from refimpl.engine.configuration.schema import DeepSpeedConfig
from refimpl.engine.configuration.zero_sections import ZeroOptimization
from refimpl.engine.copies import check_copies, check_trained_alike
from refimpl.engine.cut import AUTOTP_DTYPE, counted_elsewhere, cut
from refimpl.engine.dataloader import first_batch, make_dataloader
from refimpl.engine.experts import ExpertRanks, deal_out, refuse_stacks, refuse_unlike, same_experts
from refimpl.engine.homes import heard_by_all, with_homes
from refimpl.engine.layout import check_agreed, check_layout, check_whole
from refimpl.engine.leaf import flagged
from refimpl.engine.monitor import Monitor
from refimpl.engine.placed import place_model, sparse
from refimpl.engine.trained import (
    MakeOptimizer,
    Parameters,
    found_again,
    hand_over,
    make_optimizer,
    make_scheduler,
    mark_hidden,
    names_of,
    trainable,
)
from refimpl.measure.comms_log import CommsLog
from refimpl.parallel.pipeline.module import PipelineModule
from refimpl.zero.config import LoCo, ZeroConfig
from refimpl.zero.ddp import DDP
from refimpl.zero.stage import Stage
from refimpl.zero.zero1 import Zero1
from refimpl.zero.zero2 import Zero2
from refimpl.zero.zero3 import Zero3

STAGES: tuple[Callable[..., Stage], ...] = (DDP, Zero1, Zero2, Zero3)


@dataclass(frozen=True)
class Parts:
    """What an engine is made of. `stage.optimizer` is the optimizer."""

    config: DeepSpeedConfig
    axes: Axes
    model: nn.Module
    stage: Stage
    scheduler: Any | None  # whatever has step(), state_dict() and load_state_dict()
    dataloader: DataLoader[Any] | None
    collate_fn: Callable[[list[Any]], Any] | None
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

    Without any optimizer the engine is for inference, and a schedule in the configuration has nothing to do. ValueError
    for one that was given as an argument.
    """
    settings = read(config, axes, model, optimizer is not None)
    in_order = isinstance(model, PipelineModule)  # DeepSpeed shuffles the data of no pipeline
    if settings.sparse_attention is not None:
        sparse(model, settings.sparse_attention, axes)
    experts, shared = ExpertRanks(axes), settings.expert_parallel.autoep_size if settings.expert_parallel.enabled else 1
    named = None
    if not split and max(axes.model.size, shared) > 1 and not isinstance(model, PipelineModule):
        named = names_of(model, parameters, optimizer)
    if not split:
        example = first_batch(dataset, collate_fn) if dataset is not None and axes.tensor.size > 1 else None
        model = cut(model, axes, settings.tensor_parallel.partition_config, example)
    if shared > 1:
        deal_out(model, experts, shared)
    place_model(model, settings, axes.replicas.device)
    opt = None
    if optimizer is not None or settings.optimizer is not None:
        if named is not None:
            parameters = here = found_again(model, named)
            if isinstance(optimizer, Optimizer):
                hand_over(optimizer, here)
        mark_hidden(model, settings.optimizer, axes)
        is_part = axes.pipeline.size > 1 or shared > 1
        opt = make_optimizer(optimizer, settings.optimizer, trainable(model, parameters, is_part))
    stage, axes = make_stage(model, opt, settings, axes, experts)
    loader = None
    if dataset is not None:
        micro_batch, drop_last = settings.train_micro_batch_size_per_gpu, settings.dataloader_drop_last
        loader = make_dataloader(dataset, micro_batch, axes.feed, axes.feeds, drop_last, collate_fn, not in_order)
    if opt is None and scheduler is not None:
        raise ValueError(
            "lr_scheduler: there is no optimizer whose rates it would move: give one, or name one in config"
        )
    schedule = None if opt is None else make_scheduler(scheduler, settings.scheduler, opt)
    monitor = together(axes.world, partial(Monitor, settings, axes.world.rank), ConfigError)
    return Parts(settings, axes, model, stage, schedule, loader, collate_fn, monitor)


def read(
    config: Mapping[str, Any] | str | Path, axes: Axes, model: nn.Module, own_optimizer: bool = False
) -> DeepSpeedConfig:
    """The configuration, checked against the ranks that there are; what it says of logs is done."""
    settings = load_config(
        config, world_size=axes.feeds, model=model, rank=axes.world.rank, own_optimizer=own_optimizer
    )
    check_layout(settings, axes, isinstance(model, PipelineModule))
    check_agreed(settings, axes)
    dtype, asked = settings.zero_config().dtype, getattr(model, AUTOTP_DTYPE, None)
    if dtype is not None and asked not in (None, dtype):
        raise ConfigError(f"the configuration is for {dtype}, and tp_model_init was asked for {asked}: which?")
    if (log := settings.comms_logger).enabled:
        axes.world.ledger.log = CommsLog(True, log.verbose, log.prof_all, log.prof_ops, log.debug)
    if settings.log_level is not None:
        for name in ("refimpl", "DeepSpeed"):  # the second is deepspeed.utils.logger, which log_dist writes to
            logging.getLogger(name).setLevel(settings.log_level)
    if settings.dump_state and axes.world.rank == 0:
        print(settings.model_dump_json(indent=2, exclude={"comet": {"api_key"}}))
    return settings


def make_stage(
    model: nn.Module, optimizer: Optimizer | None, settings: DeepSpeedConfig, axes: Axes, ranks: ExpertRanks
) -> tuple[Stage, Axes]:
    """The stage that the configuration asks for, over all axes; and these, with those of the model's experts."""
    number = settings.zero_optimization.stage
    zero = settings.zero_config()
    if number == 3:
        zero = replace(zero, leaf_modules=flagged(model, settings.zero_optimization.leaf_module, axes.world.rank))
    if axes.context.size > 1 and settings.seq_parallel_communication_data_type is not None:
        zero = replace(zero, communication_data_type=settings.seq_parallel_communication_data_type)
    zero = with_plus(with_homes(zero, settings, axes.replicas.device, axes.world), settings.zero_optimization)
    experts = same_experts(model, ranks)
    refuse_stacks(model, optimizer)
    if ranks.made and axes.across.size > 1:
        raise ConfigError("zero_optimization.mics_shard_size: experts are not replicated over nodes; leave it out")
    axes = ranks.widest
    if number == 3:
        refuse_unlike(model, experts, axes.expert)
    if axes.model.size > 1:
        check_trained_alike(model, optimizer, axes)
    build = partial(STAGES[number], model, optimizer, axes.shards, zero, settings.loss_scaler(), experts)
    stage = heard_by_all(axes.world, build) if axes.world.size > axes.shards.size else build()
    if axes.across.size > 1:
        stage.replicate(axes.across)
    if axes.model.size > 1:
        copies = counted_elsewhere(model, axes)
        check_whole(optimizer, axes, copies)
        if optimizer is not None:
            check_copies(stage, axes, copies)
        stage.spans(axes.model, copies)
    return stage, axes


def with_plus(zero: ZeroConfig, section: ZeroOptimization) -> ZeroConfig:
    """`zero` with the section's ZeRO++ and MiCS keys: see `refimpl.zero.gather.plus`. ConfigError names the key."""
    loco = section.zeropp_loco_param
    try:
        return replace(
            zero,
            zero_quantized_weights=section.zero_quantized_weights,
            zero_quantized_nontrainable_weights=section.zero_quantized_nontrainable_weights,
            zero_hpz_partition_size=max(1, section.zero_hpz_partition_size),
            zero_quantized_gradients=section.zero_quantized_gradients,
            zeropp_loco_param=None if loco is None else LoCo(loco.err_beta, loco.reset_T),
            mics_hierarchical_params_gather=section.mics_hierarchical_params_gather,
        )
    except ValueError as error:
        raise ConfigError(str(error).replace("ZeroConfig.", "zero_optimization.")) from error
