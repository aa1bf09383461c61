"""Block-sparse attention under DeepSpeed's names, which DeepSpeed itself dropped in 0.19.7. Runs on any device."""

from refimpl.deepspeed.ops.sparse_attention.bert_sparse_self_attention import BertSparseSelfAttention
from refimpl.deepspeed.ops.sparse_attention.sparse_attention_utils import SparseAttentionUtils
from refimpl.deepspeed.ops.sparse_attention.sparse_self_attention import SparseSelfAttention
from refimpl.model.patterns.base import SparsityConfig
from refimpl.model.patterns.fixed import FixedSparsityConfig
from refimpl.model.patterns.plain import DenseSparsityConfig
from refimpl.model.patterns.sliding import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    LocalSlidingWindowSparsityConfig,
)
from refimpl.model.patterns.variable import VariableSparsityConfig

__all__ = [
    "BSLongformerSparsityConfig", "BertSparseSelfAttention", "BigBirdSparsityConfig", "DenseSparsityConfig",
    "FixedSparsityConfig", "LocalSlidingWindowSparsityConfig", "SparseAttentionUtils", "SparseSelfAttention",
    "SparsityConfig", "VariableSparsityConfig",
]  # fmt: skip
