"""Offload's devices and sections, as scripts name them. DeepSpeed: deepspeed/runtime/zero/offload_config.py."""

from enum import StrEnum

from refimpl.engine.configuration.zero_sections import OffloadOptimizer as DeepSpeedZeroOffloadOptimizerConfig
from refimpl.engine.configuration.zero_sections import OffloadParam as DeepSpeedZeroOffloadParamConfig

__all__ = [
    "DeepSpeedZeroOffloadOptimizerConfig",
    "DeepSpeedZeroOffloadParamConfig",
    "OffloadDeviceEnum",
    "OffloadStateTypeEnum",
]


class OffloadDeviceEnum(StrEnum):
    """Where optimizer states or parameters rest."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(StrEnum):
    """What `offload_states` can be told to send: it asks `include=` for some of these."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"
