"""The average of DeepSpeed's tables. DeepSpeed: deepspeed/utils/timer.py."""

from refimpl.measure.comms_log import trim_mean

__all__ = ["trim_mean"]
