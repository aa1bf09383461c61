"""Weights & Biases. DeepSpeed: deepspeed/monitor/wandb.py."""

from refimpl.deepspeed.monitor.monitor import WandbMonitor

__all__ = ["WandbMonitor"]
