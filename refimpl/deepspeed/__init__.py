"""DeepSpeed's own spelling: a training script changes one line, `import refimpl.deepspeed as deepspeed`.

    deepspeed.initialize, init_distributed, add_config_arguments, DeepSpeedEngine, DeepSpeedConfig
    deepspeed.zero.Init, zero.GatheredParameters        runtime/zero/partition_parameters.py
    deepspeed.zero.TiledLinear                          zero/tiled.py
    deepspeed.checkpointing.configure, .checkpoint      runtime/activation_checkpointing/checkpointing.py
    deepspeed.comm                                      collectives, torch.distributed's
    deepspeed.elasticity                                one batch for many numbers of ranks
    deepspeed.ops.adam, .adagrad, .lion                 optimizers by DeepSpeed's names
    deepspeed.utils                                     safe_get_full_fp32_param and its kin, logger, leaf modules
    deepspeed.accelerator.get_accelerator()             the device of this rank

Or no line at all: see refimpl/as_deepspeed.py. Start the ranks with torchrun, srun or mpirun; without them the script
runs as one process. Not one idea lives here: modules have DeepSpeed's paths and name those of refimpl that do the work.
DeepSpeed's file: deepspeed/__init__.py.
"""

import argparse
from collections.abc import Callable, Mapping
from logging import WARNING
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from refimpl.as_deepspeed import VERSION
from refimpl.deepspeed import (
    accelerator,
    beside_accelerate,
    checkpoint,
    comm,
    elasticity,
    launcher,
    module_inject,
    moe,
    ops,
    pipe,
    runtime,
    utils,
)
from refimpl.deepspeed.absent import absent
from refimpl.deepspeed.accelerator import get_accelerator
from refimpl.deepspeed.comm import init_distributed
from refimpl.deepspeed.module_inject.layers import set_autotp_mode
from refimpl.deepspeed.pipe import DualPipeVModule, PipelineModule
from refimpl.deepspeed.runtime import zero
from refimpl.deepspeed.runtime.activation_checkpointing import checkpointing
from refimpl.deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from refimpl.deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from refimpl.deepspeed.runtime.dataloader import RepeatingLoader
from refimpl.deepspeed.runtime.engine import DeepSpeedEngine
from refimpl.deepspeed.runtime.lr_schedules import add_tuning_arguments
from refimpl.deepspeed.runtime.pipe.dualpipev import DualPipeVEngine
from refimpl.deepspeed.runtime.pipe.engine import PipelineEngine
from refimpl.deepspeed.utils import OnDevice, log_dist, logger
from refimpl.engine import initialize as _engine
from refimpl.engine.cut import AUTOTP_DTYPE, AUTOTP_RANKS, AUTOTP_SIZE
from refimpl.engine.trained import MakeOptimizer, Parameters
from refimpl.zero.parameter import stage_of

__version__ = version = VERSION
__git_hash__ = __git_branch__ = "refimpl"
__version_major__, __version_minor__, __version_patch__ = map(int, VERSION.partition("+")[0].split("."))

__all__ = [
    "DeepSpeedConfig", "DeepSpeedConfigError", "DeepSpeedEngine", "DeepSpeedOptimizer", "DeepSpeedTransformerConfig",
    "DeepSpeedTransformerLayer", "DualPipeVEngine", "DualPipeVModule", "OnDevice", "PipelineEngine", "PipelineModule",
    "RepeatingLoader", "accelerator", "add_config_arguments", "add_tuning_arguments", "checkpoint", "checkpointing",
    "comm", "elasticity", "get_accelerator", "init_distributed", "init_inference", "initialize", "launcher", "log_dist",
    "logger", "module_inject", "moe", "ops", "pipe", "runtime", "set_autotp_mode", "tp_model_init", "utils", "version",
    "zero",
]  # fmt: skip

init_inference = absent("deepspeed.init_inference", "inference kernels; call the model itself")
DeepSpeedTransformerLayer, DeepSpeedTransformerConfig = (
    absent(f"deepspeed.{name}", "a fused layer; use torch.nn.TransformerEncoderLayer")
    for name in ("DeepSpeedTransformerLayer", "DeepSpeedTransformerConfig")
)


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | MakeOptimizer | None = None,
    model_parameters: Parameters | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any | None = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Mapping[str, Any] | str | Path | None = None,
    mesh_param: Any = None,
    config_params: Mapping[str, Any] | str | Path | None = None,
) -> tuple[DeepSpeedEngine, Optimizer | None, DataLoader[Any] | None, Any | None]:
    """`refimpl.initialize` with DeepSpeed's arguments in DeepSpeed's order: (engine, optimizer, dataloader, scheduler).

    torch.distributed is initialised afterwards, as scripts expect; a process without a launcher is a world of one.
    `distributed_port` is the launcher's to choose. As in DeepSpeed a model goes over from an engine that it had before
    (Lightning's `trainer.fit(model)` and then `trainer.test(model)`); that one cannot train it any more, and says so.
    """
    log_dist(f"DeepSpeed info: version={VERSION}, git-hash={__git_hash__}, git-branch={__git_branch__}", ranks=[0])
    comm.init_distributed(dist_init_required=dist_init_required)
    beside_accelerate.tell()
    if model is not None:
        _leave_former(model)
    made = _engine.initialize(
        args, model, optimizer, model_parameters, training_data, lr_scheduler,
        mpu, dist_init_required, collate_fn, config, config_params, mesh_param,
    )  # fmt: skip
    made[0].mpu = model.grid if isinstance(model, PipelineModule) else mpu
    utils.groups.adopt(made[0].axes)
    comm.adopt(made[0])
    checkpointing.adopt(made[0].config.activation_checkpointing)
    return made


def _leave_former(model: nn.Module) -> None:
    """Let an engine that has nothing but this model go. `initialize` refuses what others have a part of."""
    params = dict.fromkeys(model.parameters())
    for stage in {id(stage): stage for p in params if (stage := stage_of(p)) is not None}.values():
        if stage.names.keys() <= params.keys():
            log_dist(f"initialize: the model leaves the engine that it had, a {type(stage).__name__}", [0], WARNING)
            stage.release(in_shards=True)


def tp_model_init(
    model: nn.Module, tp_size: int, dtype: torch.dtype, config: Any = None, tp_group: dist.ProcessGroup | None = None
) -> nn.Module:
    """The same model in `dtype`, to be cut over tp_size ranks by `initialize`, as if its configuration said so.

    config: that which `initialize` is given too, as transformers' Trainer does; it is read there. `tp_group`: the ranks
    that it is cut over, where the caller has made groups: `initialize` needs an mpu that has them, unless they are its
    own. ValueError if it has not tp_size ranks.
    """
    if tp_group is not None and tp_group.size() != tp_size:
        raise ValueError(f"tp_model_init: tp_size is {tp_size}, and tp_group has {tp_group.size()} ranks")
    setattr(model, AUTOTP_SIZE, tp_size)
    setattr(model, AUTOTP_DTYPE, dtype)
    setattr(model, AUTOTP_RANKS, None if tp_group is None else dist.get_process_group_ranks(tp_group))
    return model.to(dtype)


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed`, a flag for the script's own use, and `--deepspeed_config FILE`, which `initialize` reads."""
    group = parser.add_argument_group("DeepSpeed")
    group.add_argument("--deepspeed", action="store_true", help="a flag for the script; changes nothing by itself")
    group.add_argument("--deepspeed_config", metavar="FILE", help="DeepSpeed JSON configuration")
    return parser
