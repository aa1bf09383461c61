"""The engine under DeepSpeed's name. DeepSpeed: deepspeed/runtime/engine.py; ours: refimpl/engine/engine.py."""

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from refimpl.deepspeed.runtime.torch_autocast import autocast_if_enabled
from refimpl.engine.engine import Engine as DeepSpeedEngine
from refimpl.engine.trained import MakeOptimizer as DeepSpeedOptimizerCallable

__all__ = [
    "MEMORY_OPT_ALLREDUCE_SIZE",
    "DeepSpeedEngine",
    "DeepSpeedOptimizerCallable",
    "DeepSpeedSchedulerCallable",
    "autocast_if_enabled",
]

MEMORY_OPT_ALLREDUCE_SIZE = 500_000_000  # for `engine.allreduce_gradients(bucket_size=...)`, which does not need it
DeepSpeedSchedulerCallable = Callable[[Optimizer], Any]  # these two: what `initialize` takes in an object's place
