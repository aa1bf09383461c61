"""As `zero.stage_1_and_2`, for stage 0 in fp16. DeepSpeed: deepspeed/runtime/fp16/fused_optimizer.py."""

from typing import Any

from refimpl.deepspeed.runtime.zero.stage_1_and_2 import OfStage
from refimpl.zero.ddp import DDP


class OfScaled(OfStage):
    def __instancecheck__(cls, instance: Any) -> bool:
        return super().__instancecheck__(instance) and instance.stage.scaler is not None


class FP16_Optimizer(metaclass=OfScaled):
    """An optimizer over fp32 copies of fp16 weights that every rank has whole."""

    stages = (DDP,)
