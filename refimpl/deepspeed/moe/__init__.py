"""DeepSpeed's mixture-of-experts names: questions are answered, the layer is not implemented yet."""

from refimpl.deepspeed.moe import layer, utils

__all__ = ["layer", "utils"]
