"""DeepSpeed's path of the engine. DeepSpeed: deepspeed/runtime/pipe/engine.py."""

from refimpl.engine.pipeline import PipelineEngine

__all__ = ["PipelineEngine"]
