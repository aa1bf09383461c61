"""As `stage_1_and_2`. DeepSpeed: deepspeed/runtime/zero/stage3.py."""

from refimpl.deepspeed.runtime.zero.estimates import (
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
from refimpl.deepspeed.runtime.zero.parameter_offload import unwrap_model_for_generation
from refimpl.deepspeed.runtime.zero.partition_parameters import GatheredParameters, Init, ZeroParamStatus
from refimpl.deepspeed.runtime.zero.stage_1_and_2 import OfStage
from refimpl.zero.zero3 import Zero3

__all__ = [
    "DeepSpeedZeroOptimizer_Stage3", "GatheredParameters", "Init", "ZeroParamStatus",
    "estimate_zero3_model_states_mem_needs", "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live", "unwrap_model_for_generation",
]  # fmt: skip


class DeepSpeedZeroOptimizer_Stage3(metaclass=OfStage):
    """An optimizer whose parameters are sharded too."""

    stages = (Zero3,)
