"""DeepSpeed's path of DualPipeV's module and engine. DeepSpeed: deepspeed/runtime/pipe/dualpipev.py."""

from refimpl.deepspeed.pipe import DualPipeVModule
from refimpl.engine.dualpipe_v import DualPipeVEngine

__all__ = ["DualPipeVEngine", "DualPipeVModule"]
