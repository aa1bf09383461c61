"""BERT's self-attention over a pattern's blocks.

DeepSpeed until 0.19.6: deepspeed/ops/sparse_attention/bert_sparse_self_attention.py.
"""

from typing import Any

from torch import Tensor, nn

from refimpl.deepspeed.ops.sparse_attention.sparse_self_attention import SparseSelfAttention
from refimpl.model.patterns.base import SparsityConfig
from refimpl.model.patterns.fixed import FixedSparsityConfig


class BertSparseSelfAttention(nn.Module):
    """query, key and value layers around a SparseSelfAttention; `config` has hidden_size and num_attention_heads."""

    def __init__(self, config: Any, sparsity_config: SparsityConfig | None = None) -> None:
        super().__init__()
        heads, hidden = config.num_attention_heads, config.hidden_size
        if hidden % heads:
            raise ValueError(f"the hidden size {hidden} is not a multiple of the number of attention heads {heads}")
        self.num_attention_heads = heads
        self.attention_head_size = hidden // heads
        self.all_head_size = hidden
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        longest = getattr(config, "max_position_embeddings", 2048)
        pattern = sparsity_config or FixedSparsityConfig(num_heads=heads)
        longest = -(-longest // pattern.block) * pattern.block
        self.sparse_self_attention = SparseSelfAttention(pattern, max_seq_length=longest)

    def transpose_for_scores(self, x: Tensor) -> Tensor:
        """[B, T, hidden] -> [B, heads, T, D]."""
        return x.view(*x.shape[:2], self.num_attention_heads, self.attention_head_size).transpose(1, 2)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """hidden_states [B, T, hidden] -> [B, T, hidden]; attention_mask [B, 1, 1, T] is added to the scores."""
        q, k, v = (self.transpose_for_scores(layer(hidden_states)) for layer in (self.query, self.key, self.value))
        mixed: Tensor = self.sparse_self_attention(q, k, v, key_padding_mask=attention_mask)
        return mixed.transpose(1, 2).flatten(2)
