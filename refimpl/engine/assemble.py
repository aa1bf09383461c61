"""From the arguments of `initialize`, or of DeepSpeed's engine, to the parts of an engine, on all ranks of the job.

DeepSpeed's counterparts: `DeepSpeedEngine.__init__` in deepspeed/runtime/engine.py, `init_distributed` in
deepspeed/comm/comm.py.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from refimpl import launch
from refimpl.comm import levels
from refimpl.comm.axes import Axes
from refimpl.comm.group import Group
from refimpl.engine.build import Parts, build
from refimpl.engine.configuration.keys import ConfigError
from refimpl.engine.configuration.read import raw_config
from refimpl.engine.configuration.schema import DeepSpeedConfig
from refimpl.engine.cut import AUTOTP_RANKS, AUTOTP_SIZE
from refimpl.engine.layout import AXIS_KEYS, axes_asked
from refimpl.engine.trained import MakeOptimizer, Parameters
from refimpl.parallel.pipeline.module import PipelineModule


def parts_of(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | MakeOptimizer | None = None,
    model_parameters: Parameters | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Mapping[str, Any] | str | Path | None = None,
    config_class: DeepSpeedConfig | None = None,
    *,
    config_params: Mapping[str, Any] | str | Path | None = None,
    mesh_param: tuple[int, int] | None = None,
) -> Parts:
    """What `initialize` says of each; the order is that of DeepSpeed's engine. On every rank, with the same arguments.

    config_class: the configuration, read already; it wins over `config`, from which a caller has made it.
    """
    if config_class is not None:
        config = config_class.model_dump(exclude_unset=True)
    given = {
        "config": config,
        "config_params": config_params,
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
    }
    sources = {name: value for name, value in given.items() if value is not None}
    if len(sources) != 1:
        found = " and ".join(sources) or "none"
        raise ValueError(f"initialize needs one configuration, as one of {', '.join(given)}; found {found}")
    if model is None:
        raise ValueError("initialize needs a model")
    if not isinstance(model, nn.Module):
        given_model = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise TypeError(f"initialize: model must be a torch.nn.Module, not {given_model}")
    (source,) = sources.values()
    raw = raw_config(source)
    if mesh_param is not None:
        if len(mesh_param) != 2:
            raise ValueError(f"mesh_param = {mesh_param}: must be (data_parallel_size, sequence_parallel_size)")
        raw |= dict(zip(("data_parallel_size", "sequence_parallel_size"), mesh_param, strict=True))
    size = autotp(raw, model)
    axes = laid_out(raw, model, mpu, connect(dist_init_required))
    refuse_other_ranks(model, axes)
    is_cut = mpu is not None and not size  # tp_model_init has left the cut to this call, also along an mpu's groups
    return build(model, raw, axes, optimizer, model_parameters, training_data, lr_scheduler, collate_fn, is_cut)


def autotp(raw: dict[str, Any], model: nn.Module) -> int:
    """The size that `tp_model_init` was asked for, or 0; the configuration says it then. ConfigError for another."""
    if size := getattr(model, AUTOTP_SIZE, 0):
        section = dict(raw.get("tensor_parallel") or {})
        if (said := section.get("autotp_size") or size) not in (size, "auto"):
            raise ConfigError(f"tensor_parallel.autotp_size is {said}, and tp_model_init was asked for {size}: which?")
        raw["tensor_parallel"] = section | {"autotp_size": size}
    return size


def refuse_other_ranks(model: nn.Module, axes: Axes) -> None:
    """ValueError where `tp_model_init` was given a group, and the model would be cut over other ranks than its own."""
    ranks = getattr(model, AUTOTP_RANKS, None)
    if ranks is not None and set(ranks) != set(axes.tensor.ranks):
        raise ValueError(
            f"tp_model_init: tp_group has ranks {ranks}, and initialize would cut the model over {axes.tensor.ranks}: "
            "give it the mpu whose model parallel group that is"
        )


def laid_out(raw: Mapping[str, Any], model: nn.Module, mpu: Any, world: Group) -> Axes:
    """The axes as a PipelineModule, an mpu or the configuration has them."""
    asked = axes_asked(raw)
    said = world.all_gather_object(asked)
    if any(other != said[0] for other in said):
        raise ConfigError(f"the ranks ask for different axes: {said}; give all of them the same configuration")
    if not isinstance(model, PipelineModule):
        return of_keys(asked, world) if mpu is None else Axes.of_mpu(mpu, world)
    if mpu is not None:
        raise ValueError("mpu: a PipelineModule has its own layout of the ranks; leave mpu out")
    return model.axes


def of_keys(asked: Mapping[str, int], world: Group) -> Axes:
    """The axes of these sizes. ConfigError, by the keys that ask for them, where they do not divide the ranks."""
    try:
        return Axes.of_sizes(asked, world)
    except ValueError as error:
        keys = ", ".join(AXIS_KEYS[axis] for axis, size in asked.items() if size > 1)
        raise ConfigError(f"{keys}: {error}") from error


def connect(dist_init_required: bool | None = None) -> Group:
    """All ranks of this job: those of `launch.run`, those of torchrun, or this process alone, on its GPU if it has one.

    That GPU is the process's current one then, as in DeepSpeed, also where a script has made the process group and left
    that out: else what it makes on "cuda" would be on the first GPU, on every rank.
    `dist_init_required` is DeepSpeed's: None and True join a launcher's ranks when they are not joined yet; False
    insists that torch.distributed is initialised already, RuntimeError if it is not.
    """
    if not dist.is_initialized():
        if dist_init_required is False:
            raise RuntimeError("dist_init_required=False, but torch.distributed is not initialised: leave it out")
        if launch.under_torchrun():
            launch.join()
        elif torch.cuda.is_available():
            os.environ.setdefault("REFIMPL_DEVICE", f"cuda:{torch.cuda.current_device()}")
    world = levels.world()
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    return world
