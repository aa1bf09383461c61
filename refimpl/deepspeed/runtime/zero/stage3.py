"""As `stage_1_and_2`. DeepSpeed: deepspeed/runtime/zero/stage3.py."""

from refimpl.deepspeed.runtime.zero.stage_1_and_2 import OfStage
from refimpl.zero.zero3 import Zero3


class DeepSpeedZeroOptimizer_Stage3(metaclass=OfStage):
    """An optimizer whose parameters are sharded too."""

    stages = (Zero3,)
