"""`refimpl.initialize`: one call from a plain torch model to an engine that trains it on all ranks.

What is made of the arguments first: assemble.py beside this file. DeepSpeed's counterpart: `initialize` in
deepspeed/__init__.py.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from refimpl.engine.assemble import parts_of
from refimpl.engine.dualpipe_v import DualPipeVEngine
from refimpl.engine.engine import Engine
from refimpl.engine.pipeline import PipelineEngine
from refimpl.engine.python_gc import COLLECTOR
from refimpl.engine.trained import MakeOptimizer, Parameters
from refimpl.parallel.pipeline.module import PipelineModule


def initialize(
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
    config_params: Mapping[str, Any] | str | Path | None = None,
    mesh_param: tuple[int, int] | None = None,
) -> tuple[Engine, Optimizer | None, DataLoader[Any] | None, Any | None]:
    """Make an engine from a model and a DeepSpeed configuration: (engine, optimizer, dataloader, scheduler).

    The configuration is `config` (a dictionary or a path), `config_params` (its old name) or `args.deepspeed_config`:
    exactly one of them. `optimizer` is a torch optimizer over the model's parameters, or a callable that makes one of
    them, and wins over the configuration's. `lr_scheduler` is an object with step(), or a callable that makes one of
    the optimizer. A `PipelineModule`, and a GPT with `pipeline.stages`, are trained by a `PipelineEngine`. `mpu` is an
    object or module with get_data_parallel_group(), get_model_parallel_group() or their like: the model is split along
    them already, and says of a parameter that it is a part by its attribute `model_parallel` or
    `tensor_model_parallel`; or it is whole, behind `tp_model_init`, and is split along them here. `mesh_param`:
    (data_parallel_size, sequence_parallel_size), over the file's. ValueError, or ConfigError, names what is wrong. On
    every rank, with the same arguments.
    """
    parts = parts_of(
        args, model, optimizer, model_parameters, training_data, lr_scheduler,
        mpu, dist_init_required, collate_fn, config, config_params=config_params, mesh_param=mesh_param,
    )  # fmt: skip
    engine = kind_of(parts.model)(parts)
    if engine._config.disable_python_gc:  # last: an engine that is refused leaves the collector on
        engine.resume_python_gc = COLLECTOR.pause(engine)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def kind_of(model: nn.Module) -> type[Engine]:
    """Which engine trains it."""
    if not isinstance(model, PipelineModule):
        return Engine
    return DualPipeVEngine if model.name == "dualpipe-v" else PipelineEngine
