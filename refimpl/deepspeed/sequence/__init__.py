"""DeepSpeed's sequence parallelism by name. DeepSpeed: deepspeed/sequence."""
