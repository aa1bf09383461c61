"""`deepspeed.zero`: `Init`, `GatheredParameters`, `MiCS_Init`, `TiledLinear` and what belongs to them."""

from refimpl.deepspeed.runtime.zero import (
    config,
    offload_states,
    parameter_offload,
    partition_parameters,
    stage3,
    stage_1_and_2,
    tiling,
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
from refimpl.deepspeed.runtime.zero.tiling import TiledLinear, TiledLinearReturnBias

__all__ = [
    "GatheredParameters", "Init", "MiCS_Init", "TiledLinear", "TiledLinearReturnBias", "ZeroParamStatus",
    "ZeroParamType", "config", "offload_states", "parameter_offload", "partition_parameters",
    "register_external_parameter", "stage3", "stage_1_and_2", "tiling", "unregister_external_parameter",
    "unwrap_model_for_generation", "utils",
]  # fmt: skip
