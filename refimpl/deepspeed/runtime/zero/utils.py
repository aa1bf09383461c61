"""Whether a parameter is ZeRO-3's, and an error to catch. DeepSpeed: deepspeed/runtime/zero/utils.py."""

from typing import Any


class ZeRORuntimeException(Exception):
    """What DeepSpeed says to a checkpoint of another number of ranks. Nobody raises it here, where that goes on."""


def is_zero_param(parameter: Any) -> bool:
    """Whether it is sharded, and has DeepSpeed's attributes."""
    return hasattr(parameter, "ds_id")
