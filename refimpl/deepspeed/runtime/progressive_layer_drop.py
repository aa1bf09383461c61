"""DeepSpeed: deepspeed/runtime/progressive_layer_drop.py, which it removed in 0.19.8."""

from refimpl.optim.layer_drop import ProgressiveLayerDrop

__all__ = ["ProgressiveLayerDrop"]
