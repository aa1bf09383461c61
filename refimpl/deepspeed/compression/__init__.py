"""`deepspeed.compression`: its helpers alone, which LoRA code uses to swap modules by name; nothing is pruned here.

`refimpl.compress` is another matter: it compresses what is sent, not the model.
"""

from refimpl.deepspeed.compression import helper

__all__ = ["helper"]
