"""The section `zero_optimization` under DeepSpeed's name. DeepSpeed: deepspeed/runtime/zero/config.py."""

from enum import IntEnum

from refimpl.deepspeed.runtime.zero.offload_config import (
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
)
from refimpl.engine.configuration.zero_sections import ZeroOptimization as DeepSpeedZeroConfig

__all__ = [
    "DeepSpeedZeroConfig",
    "DeepSpeedZeroOffloadOptimizerConfig",
    "DeepSpeedZeroOffloadParamConfig",
    "ZeroStageEnum",
]


class ZeroStageEnum(IntEnum):
    """The stages by name; a stage is a plain number elsewhere."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3
