"""The section `zero_optimization` under DeepSpeed's name. DeepSpeed: deepspeed/runtime/zero/config.py."""

from refimpl.deepspeed.runtime.zero.offload_config import (
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
)
from refimpl.engine.sections import ZeroOptimization as DeepSpeedZeroConfig

__all__ = ["DeepSpeedZeroConfig", "DeepSpeedZeroOffloadOptimizerConfig", "DeepSpeedZeroOffloadParamConfig"]
