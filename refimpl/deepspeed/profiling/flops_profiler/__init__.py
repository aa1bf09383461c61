"""DeepSpeed's path of its profiler of FLOPs. DeepSpeed: deepspeed/profiling/flops_profiler."""

from refimpl.measure.flops import FlopsProfiler, get_model_profile

__all__ = ["FlopsProfiler", "get_model_profile"]
