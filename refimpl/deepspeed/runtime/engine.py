"""The engine under DeepSpeed's name. DeepSpeed: deepspeed/runtime/engine.py; ours: refimpl/engine/engine.py."""

from refimpl.engine.engine import Engine as DeepSpeedEngine

__all__ = ["DeepSpeedEngine"]
