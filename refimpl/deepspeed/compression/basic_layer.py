"""The layers that `init_compression` makes, by DeepSpeed's names. DeepSpeed: compression/basic_layer.py."""

from refimpl.compress.weights.layers import CompressedConv2d as Conv2dLayer_Compress
from refimpl.compress.weights.layers import CompressedEmbedding as Embedding_Compress
from refimpl.compress.weights.layers import CompressedLinear as LinearLayer_Compress

__all__ = ["Conv2dLayer_Compress", "Embedding_Compress", "LinearLayer_Compress"]
