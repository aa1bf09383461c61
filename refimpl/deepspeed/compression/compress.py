"""DeepSpeed: deepspeed/compression/compress.py, which it dropped in 0.19.7."""

from refimpl.deepspeed.absent import absent

__all__ = ["init_compression", "redundancy_clean"]

init_compression, redundancy_clean = (
    absent(f"deepspeed.compression.compress.{name}", "compress the model by itself, before initialize")
    for name in __all__
)
