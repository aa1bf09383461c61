"""Optimizers of 16-bit models that are not sharded, for `isinstance`."""

from refimpl.deepspeed.runtime.fp16 import fused_optimizer, unfused_optimizer

__all__ = ["fused_optimizer", "unfused_optimizer"]
