"""The configuration under DeepSpeed's names. DeepSpeed: deepspeed/runtime/config.py; ours: refimpl/engine/config.py."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from refimpl.comm.group import Group
from refimpl.engine import config as engine_config
from refimpl.engine import schema
from refimpl.engine.keys import ConfigError as DeepSpeedConfigError

ADAM_OPTIMIZER, ADAMW_OPTIMIZER, LION_OPTIMIZER, ADAGRAD_OPTIMIZER = "adam", "adamw", "lion", "adagrad"
LAMB_OPTIMIZER, ONEBIT_LAMB_OPTIMIZER = "lamb", "onebitlamb"
ONEBIT_ADAM_OPTIMIZER, ZERO_ONE_ADAM_OPTIMIZER = "onebitadam", "zerooneadam"

__all__ = [
    "ADAGRAD_OPTIMIZER",
    "ADAMW_OPTIMIZER",
    "ADAM_OPTIMIZER",
    "LAMB_OPTIMIZER",
    "LION_OPTIMIZER",
    "ONEBIT_ADAM_OPTIMIZER",
    "ONEBIT_LAMB_OPTIMIZER",
    "ZERO_ONE_ADAM_OPTIMIZER",
    "DeepSpeedConfig",
    "DeepSpeedConfigError",
]


def DeepSpeedConfig(
    config: Mapping[str, Any] | str | Path, mpu: Any = None, mesh_device: Any = None
) -> schema.DeepSpeedConfig:
    """The file or dictionary, checked, for all ranks of this job. `DeepSpeedConfigError` names wrong keys."""
    if mpu is not None or mesh_device is not None:
        raise NotImplementedError(
            "DeepSpeedConfig: mpu and mesh_device: not part of this project; all ranks are data-parallel"
        )
    return engine_config.load_config(config, world_size=Group.world().size)
