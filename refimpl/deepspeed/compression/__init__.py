"""`deepspeed.compression`: models trained for fewer bits and fewer numbers. DeepSpeed dropped it in 0.19.7."""

from refimpl.deepspeed.compression import basic_layer, compress, helper
from refimpl.deepspeed.compression.compress import init_compression, redundancy_clean
from refimpl.deepspeed.compression.helper import convert_conv1d_to_linear

__all__ = ["basic_layer", "compress", "convert_conv1d_to_linear", "helper", "init_compression", "redundancy_clean"]
