"""The layers that `init_compression` makes, by DeepSpeed's names. DeepSpeed: compression/basic_layer.py."""

from refimpl.compress.weights.layers import CompressedConv2d as Conv2dLayer_Compress
from refimpl.compress.weights.layers import CompressedEmbedding as Embedding_Compress
from refimpl.compress.weights.layers import CompressedLinear as LinearLayer_Compress
from refimpl.deepspeed.absent import absent

__all__ = [
    "ColumnParallelLinear_Compress", "Conv2dLayer_Compress", "Embedding_Compress", "LinearLayer_Compress",
    "RowParallelLinear_Compress",
]  # fmt: skip

ColumnParallelLinear_Compress, RowParallelLinear_Compress = (
    absent(f"deepspeed.compression.basic_layer.{name}_Compress", "compressed layers of an mpu")
    for name in ("ColumnParallelLinear", "RowParallelLinear")
)
