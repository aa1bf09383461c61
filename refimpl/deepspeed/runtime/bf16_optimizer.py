"""As `zero.stage_1_and_2`, for bf16. DeepSpeed: deepspeed/runtime/bf16_optimizer.py."""

from typing import Any

import torch

from refimpl.deepspeed.runtime.zero.stage_1_and_2 import OfStage
from refimpl.zero.ddp import DDP
from refimpl.zero.zero1 import Zero1


class OfBf16(OfStage):
    def __instancecheck__(cls, instance: Any) -> bool:
        return super().__instancecheck__(instance) and any(
            p.dtype == torch.bfloat16 for p in instance.stage.model.parameters()
        )


class BF16_Optimizer(metaclass=OfBf16):
    """An optimizer over fp32 copies of bf16 weights, sharded or not."""

    stages = (DDP, Zero1)
