"""`refimpl.measure.flops` under DeepSpeed's names. DeepSpeed: deepspeed/profiling/flops_profiler/profiler.py."""

from refimpl.measure.flops import FlopsProfiler, get_model_profile

__all__ = ["FlopsProfiler", "get_model_profile"]
