"""The configuration under DeepSpeed's names.

DeepSpeed: deepspeed/runtime/config.py; ours: refimpl/engine/config.py.
"""

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from refimpl.comm.group import Group
from refimpl.engine import config as engine_config
from refimpl.engine.configuration import schema
from refimpl.engine.configuration.keys import ConfigError as DeepSpeedConfigError
from refimpl.engine.configuration.read import raw_config
from refimpl.engine.layout import AXIS_KEYS, axes_asked
from refimpl.ranks.environment import several

ADAM_OPTIMIZER, ADAMW_OPTIMIZER, LION_OPTIMIZER, ADAGRAD_OPTIMIZER = "adam", "adamw", "lion", "adagrad"
LAMB_OPTIMIZER, MUON_OPTIMIZER, ONEBIT_LAMB_OPTIMIZER = "lamb", "muon", "onebitlamb"
ONEBIT_ADAM_OPTIMIZER, ZERO_ONE_ADAM_OPTIMIZER = "onebitadam", "zerooneadam"

__all__ = [
    "ADAGRAD_OPTIMIZER", "ADAMW_OPTIMIZER", "ADAM_OPTIMIZER", "LAMB_OPTIMIZER", "LION_OPTIMIZER", "MUON_OPTIMIZER",
    "ONEBIT_ADAM_OPTIMIZER", "ONEBIT_LAMB_OPTIMIZER", "ZERO_ONE_ADAM_OPTIMIZER", "DeepSpeedConfig",
    "DeepSpeedConfigError",
]  # fmt: skip


def DeepSpeedConfig(
    config: Mapping[str, Any] | str | Path, mpu: Any = None, mesh_device: DeviceMesh | None = None
) -> schema.DeepSpeedConfig:
    """The file or dictionary, checked, for this job's ranks: as the mesh or `mpu` lays them out, else as the file does.

    `DeepSpeedConfigError` names wrong keys, and those whose axes do not divide the ranks. Before `init_distributed` the
    ranks are those that the launcher announces (DeepSpeed: one, so that its train_batch_size is too small).
    """
    raw = raw_config(config)
    return engine_config.load_config(raw, world_size=feeds(raw, mpu, mesh_device))


def feeds(raw: Mapping[str, Any], mpu: Any, mesh_device: DeviceMesh | None) -> int:
    """Ranks that read different batches. An mpu is asked what DeepSpeed asks it."""
    if mesh_device is not None:
        return dist.get_world_size(mesh_device.get_group("data_parallel"))
    if hasattr(mpu, "get_data_parallel_world_size"):
        return int(mpu.get_data_parallel_world_size())
    ranks, axes = (
        Group.world().size if dist.is_initialized() else several(),
        {axis: axes_asked(raw)[axis] for axis in ("pp", "cp", "tp")},
    )
    if hasattr(mpu, "get_sequence_parallel_world_size"):
        return ranks // int(mpu.get_sequence_parallel_world_size())
    if ranks % prod(axes.values()):
        keys = ", ".join(AXIS_KEYS[axis] for axis, size in axes.items() if size > 1)
        raise DeepSpeedConfigError(f"{keys}: {ranks} ranks are no multiple of {prod(axes.values())}")
    return ranks // prod(axes.values())
