"""Which accelerator there is: one class answers for all. DeepSpeed: accelerator/real_accelerator.py."""

from refimpl.deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator


def get_accelerator() -> DeepSpeedAccelerator:
    """The device that this rank computes on."""
    return DeepSpeedAccelerator()


def is_current_accelerator_supported() -> bool:
    """Always."""
    return True
