"""CSV files. DeepSpeed: deepspeed/monitor/csv_monitor.py."""

from refimpl.deepspeed.monitor.monitor import csvMonitor

__all__ = ["csvMonitor"]
