"""The average of DeepSpeed's tables, and the engine's `tput_timer`. DeepSpeed: deepspeed/utils/timer.py."""

from refimpl.measure.comms_log import trim_mean
from refimpl.measure.throughput import ThroughputTimer

__all__ = ["ThroughputTimer", "trim_mean"]
