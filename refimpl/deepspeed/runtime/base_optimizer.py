"""What all of DeepSpeed's optimizers are, for `isinstance`. DeepSpeed: deepspeed/runtime/base_optimizer.py."""

from refimpl.deepspeed.runtime.zero.stage_1_and_2 import OfStage
from refimpl.zero.stage import Stage


class DeepSpeedOptimizer(metaclass=OfStage):
    """An optimizer that a stage has taken over."""

    stages = (Stage,)


class ZeROOptimizer(metaclass=OfStage):
    """The same: stage 0 is one too, here."""

    stages = (Stage,)
