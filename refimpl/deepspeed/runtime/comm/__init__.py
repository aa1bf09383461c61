"""Collectives on several tensors at once. DeepSpeed: deepspeed/runtime/comm."""
