"""Whose optimizer it is, as scripts ask: `isinstance(engine.optimizer, DeepSpeedZeroOptimizer)`.

Here the optimizer stays the object that the caller made, and a stage takes it over (refimpl/zero/loop/owned.py); so the
answer is that stage's. None of these classes is made by anybody. DeepSpeed: deepspeed/runtime/zero/stage_1_and_2.py.
"""

from typing import Any, NoReturn

from refimpl.deepspeed.runtime.zero.estimates import (
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
)
from refimpl.zero.stage import Stage
from refimpl.zero.zero1 import Zero1
from refimpl.zero.zero2 import Zero2

__all__ = [
    "DeepSpeedZeroOptimizer", "OfStage", "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold", "estimate_zero2_model_states_mem_needs_all_live",
]  # fmt: skip


class OfStage(type):
    """A class whose instances are the optimizers that one of its `stages` has taken over."""

    stages: tuple[type[Stage], ...] = ()

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(getattr(instance, "stage", None), cls.stages)

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{cls.__name__} is for isinstance alone: deepspeed.initialize makes the optimizer")


class DeepSpeedZeroOptimizer(metaclass=OfStage):
    """An optimizer whose states, or states and gradients, are sharded."""

    stages = (Zero1, Zero2)
