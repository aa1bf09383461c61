"""TensorBoard's event files. DeepSpeed: deepspeed/monitor/tensorboard.py."""

from refimpl.deepspeed.monitor.monitor import TensorBoardMonitor

__all__ = ["TensorBoardMonitor"]
