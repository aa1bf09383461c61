"""DeepSpeed's path of what counts a model's work. DeepSpeed: deepspeed/profiling."""
