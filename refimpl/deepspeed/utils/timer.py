"""The average of DeepSpeed's tables, and the engine's `tput_timer`. DeepSpeed: deepspeed/utils/timer.py."""

from refimpl.measure.comms_log import trim_mean
from refimpl.measure.throughput import ThroughputTimer

__all__ = ["ThroughputTimer", "trim_mean"]

# Names of timers that Megatron-DeepSpeed's zero-bubble pipeline imports.
BACKWARD_MICRO_TIMER, BACKWARD_GLOBAL_TIMER = "bwd_microstep", "bwd"
BACKWARD_INNER_MICRO_TIMER, BACKWARD_INNER_GLOBAL_TIMER = "bwd_inner_microstep", "bwd_inner"
