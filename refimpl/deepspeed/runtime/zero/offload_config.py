"""Offload's devices and sections, as scripts name them. DeepSpeed: deepspeed/runtime/zero/offload_config.py."""

from enum import StrEnum

from refimpl.engine.sections import OffloadOptimizer as DeepSpeedZeroOffloadOptimizerConfig
from refimpl.engine.sections import OffloadParam as DeepSpeedZeroOffloadParamConfig

__all__ = ["DeepSpeedZeroOffloadOptimizerConfig", "DeepSpeedZeroOffloadParamConfig", "OffloadDeviceEnum"]


class OffloadDeviceEnum(StrEnum):
    """Where optimizer states or parameters rest."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"
