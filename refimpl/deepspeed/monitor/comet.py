"""Comet. DeepSpeed: deepspeed/monitor/comet.py."""

from refimpl.deepspeed.monitor.monitor import CometMonitor

__all__ = ["CometMonitor"]
