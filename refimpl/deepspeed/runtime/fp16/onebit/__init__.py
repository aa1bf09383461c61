"""1-bit Adam, 0/1 Adam, 1-bit LAMB. DeepSpeed until 0.19.6: deepspeed/runtime/fp16/onebit."""

from refimpl.deepspeed.runtime.fp16.onebit.adam import OnebitAdam
from refimpl.deepspeed.runtime.fp16.onebit.lamb import OnebitLamb
from refimpl.deepspeed.runtime.fp16.onebit.zoadam import ZeroOneAdam

__all__ = ["OnebitAdam", "OnebitLamb", "ZeroOneAdam"]
