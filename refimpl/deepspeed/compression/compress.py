"""`init_compression` and `redundancy_clean`: before training and after it. DeepSpeed: compression/compress.py.

model = init_compression(model, "ds_config.json")           # layers that round or mask, where the file says so
engine, *_ = deepspeed.initialize(model=model, config="ds_config.json")     # counts the steps, switches them on
...
model = redundancy_clean(model, "ds_config.json")           # rounded weights, zeros, smaller layers
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from refimpl.deepspeed.compression.helper import unwrapped
from refimpl.engine.compressed import finish, prepare, teach
from refimpl.engine.configuration.compression_training import CompressionTraining
from refimpl.engine.configuration.one_section import section_of
from refimpl.engine.engine import Engine
from refimpl.zero.gather.unit import unit_of

Config = Mapping[str, Any] | str | Path


def init_compression(
    model: nn.Module, deepspeed_config: Config, teacher_model: nn.Module | None = None, mpu: Any = None
) -> nn.Module:
    """Make the layers that `compression_training` names ready to be trained for it; the same model, changed in place.

    model: a module, or an engine for its module. Scores are drawn: on every rank, before initialize, which makes them
    rank 0's. With zero.Init a collective. ConfigError names the group and the layer. `mpu`'s own layers stay.
    """
    inner, config = unwrapped(model), read(deepspeed_config)
    if config.layer_reduction.enabled:
        if teacher_model is None:
            raise ValueError("init_compression: layer_reduction is enabled, and needs teacher_model")
        teach(inner, unwrapped(teacher_model), config)
    prepare(inner, config, begun=isinstance(model, Engine))
    return model


def redundancy_clean(model: nn.Module, deepspeed_config: Config, mpu: Any = None) -> nn.Module:
    """Round, zero and shrink what training has decided; the same model, changed in place. An engine of it is done then.

    NotImplementedError for a model in shards.
    """
    inner = unwrapped(model)
    if any(unit_of(p) is not None for p in inner.parameters()):
        raise NotImplementedError(
            "redundancy_clean: the weights are in shards (stage 3): load what engine.save_16bit_model wrote into a "
            "model on which init_compression was called, and clean that"
        )
    finish(inner, read(deepspeed_config))
    return model


def student_initialization(student_model: nn.Module, teacher_model: nn.Module, deepspeed_config: Config) -> None:
    """Give the student the teacher's layers that `layer_reduction` names, in this order, and the other modules."""
    teach(unwrapped(student_model), unwrapped(teacher_model), read(deepspeed_config))


def read(config: Config) -> CompressionTraining:
    """The section of a configuration. ConfigError for what is wrong in it."""
    return section_of(config, "compression_training", CompressionTraining)
