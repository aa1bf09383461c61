"""The engine under DeepSpeed's name. DeepSpeed: deepspeed/runtime/engine.py; ours: refimpl/engine/engine.py."""

from refimpl.deepspeed.runtime.torch_autocast import autocast_if_enabled
from refimpl.engine.engine import Engine as DeepSpeedEngine

__all__ = ["DeepSpeedEngine", "autocast_if_enabled"]
