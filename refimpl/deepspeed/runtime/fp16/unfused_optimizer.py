"""For optimizers that cannot step a flat tensor: here there are none. DeepSpeed: runtime/fp16/unfused_optimizer.py."""

from refimpl.deepspeed.runtime.zero.stage_1_and_2 import OfStage


class FP16_UnfusedOptimizer(metaclass=OfStage):
    """No optimizer is one: all step flat slices."""

    stages = ()
