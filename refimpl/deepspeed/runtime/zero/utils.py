"""Whether a parameter is ZeRO-3's. DeepSpeed: deepspeed/runtime/zero/utils.py."""

from typing import Any


def is_zero_param(parameter: Any) -> bool:
    """Whether it is sharded, and has DeepSpeed's attributes."""
    return hasattr(parameter, "ds_id")
