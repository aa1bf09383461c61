"""`get_accelerator()`: the device that this rank computes on. DeepSpeed: accelerator/__init__.py."""

from refimpl.deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator
from refimpl.deepspeed.accelerator.real_accelerator import get_accelerator, is_current_accelerator_supported

__all__ = ["DeepSpeedAccelerator", "get_accelerator", "is_current_accelerator_supported"]
