"""`deepspeed.zero`: `Init`, `GatheredParameters`, `MiCS_Init` and what belongs to them."""

from refimpl.deepspeed.runtime.zero import config, partition_parameters, stage3, stage_1_and_2
from refimpl.deepspeed.runtime.zero.partition_parameters import (
    GatheredParameters,
    Init,
    MiCS_Init,
    ZeroParamStatus,
    ZeroParamType,
    register_external_parameter,
    unregister_external_parameter,
    unwrap_model_for_generation,
)

__all__ = [
    "GatheredParameters",
    "Init",
    "MiCS_Init",
    "ZeroParamStatus",
    "ZeroParamType",
    "config",
    "partition_parameters",
    "register_external_parameter",
    "stage3",
    "stage_1_and_2",
    "unregister_external_parameter",
    "unwrap_model_for_generation",
]
