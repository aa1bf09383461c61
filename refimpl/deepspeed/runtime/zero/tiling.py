"""Linear layers in tiles. DeepSpeed: deepspeed/runtime/zero/tiling.py; ours: refimpl/zero/tiled.py."""

from refimpl.zero.tiled import TiledLinear, TiledLinearReturnBias

__all__ = ["TiledLinear", "TiledLinearReturnBias"]
