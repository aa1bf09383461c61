"""Optimizers of 16-bit models that are not sharded, for `isinstance`, and the 1-bit ones.

DeepSpeed until 0.19.6: deepspeed/runtime/fp16.
"""

from refimpl.deepspeed.runtime.fp16 import fused_optimizer, loss_scaler, onebit, unfused_optimizer

__all__ = ["fused_optimizer", "loss_scaler", "onebit", "unfused_optimizer"]
