"""`deepspeed.compression`: its helpers, which LoRA code uses to swap modules by name; nothing is pruned here.

`refimpl.compress` is another matter: it compresses what is sent, not the model.
"""

from refimpl.deepspeed.compression import compress, helper

__all__ = ["compress", "helper"]
