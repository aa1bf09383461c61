"""DeepSpeed's mixture of experts: `layer.MoE`, its gates, and what tells an expert's parameters from others."""

from refimpl.deepspeed.moe import experts, layer, mappings, sharded_moe, utils

__all__ = ["experts", "layer", "mappings", "sharded_moe", "utils"]
