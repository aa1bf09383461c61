"""`deepspeed.zero`: `Init`, `GatheredParameters`, `MiCS_Init` and what belongs to them."""

from refimpl.deepspeed.later import later
from refimpl.deepspeed.runtime.zero import (
    config,
    offload_states,
    parameter_offload,
    partition_parameters,
    stage3,
    stage_1_and_2,
    utils,
)
from refimpl.deepspeed.runtime.zero.parameter_offload import unwrap_model_for_generation
from refimpl.deepspeed.runtime.zero.partition_parameters import (
    GatheredParameters,
    Init,
    MiCS_Init,
    ZeroParamStatus,
    ZeroParamType,
    register_external_parameter,
    unregister_external_parameter,
)

__all__ = [
    "GatheredParameters",
    "Init",
    "MiCS_Init",
    "TiledLinear",
    "ZeroParamStatus",
    "ZeroParamType",
    "config",
    "offload_states",
    "parameter_offload",
    "partition_parameters",
    "register_external_parameter",
    "stage3",
    "stage_1_and_2",
    "unregister_external_parameter",
    "unwrap_model_for_generation",
    "utils",
]

TiledLinear = later("deepspeed.zero.TiledLinear", "linear layers in tiles: use several smaller ones")
