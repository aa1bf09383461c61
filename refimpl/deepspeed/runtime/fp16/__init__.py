"""The 1-bit optimizers by the path they are imported from. DeepSpeed until 0.19.6: deepspeed/runtime/fp16."""

from refimpl.deepspeed.runtime.fp16 import onebit

__all__ = ["onebit"]
