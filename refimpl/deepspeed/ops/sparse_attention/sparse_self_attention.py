"""SparseSelfAttention: attention over a pattern's blocks, with DeepSpeed's masks and modes.

What differs from deepspeed/ops/sparse_attention/sparse_self_attention.py: any floating-point dtype, not fp16 alone; any
device; layouts of two modules of one length are not mixed up (there one class-wide cache keeps the first by length
alone); a row that may read nothing gives zeros, not NaN; rpe gets a gradient.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from refimpl.model.patterns.base import SparsityConfig
from refimpl.model.sparse import block_sparse_attention
from refimpl.model.tiles import Plan

MODES = ("add", "mul")


class SparseSelfAttention(nn.Module):
    """softmax(q k^T / sqrt(D) + rpe + masks) v over the blocks of `sparsity_config`.

    key_padding_mask_mode, attn_mask_mode: "add" adds the mask to the scores, "mul" forbids where it is 0. The layout is
    made for max_seq_length tokens, the same on all ranks (rank 0's, if torch.distributed runs); a shorter sequence uses
    its upper left part. It masks no tokens inside a block: a causal model gives an attn_mask.
    """

    def __init__(
        self,
        sparsity_config: SparsityConfig,
        key_padding_mask_mode: str = "add",
        attn_mask_mode: str = "mul",
        max_seq_length: int = 2048,
    ) -> None:
        super().__init__()
        for name, mode in (("key_padding_mask_mode", key_padding_mask_mode), ("attn_mask_mode", attn_mask_mode)):
            if mode not in MODES:
                raise ValueError(f"{name} is {mode!r}: choose from {', '.join(MODES)}")
        self.sparsity_config = sparsity_config
        self.master_layout: Tensor
        self.register_buffer("master_layout", sparsity_config.make_layout(max_seq_length))
        self._need_layout_synchronization = True
        self.key_padding_mask_mode = key_padding_mask_mode
        self.attn_mask_mode = attn_mask_mode
        self.plans: dict[int, Plan] = {}
        self.register_load_state_dict_post_hook(_planned_anew)  # type: ignore[no-untyped-call]

    def get_layout(self, L: int) -> Tensor:
        """The layout for L tokens: int64 [heads, n, n] on the CPU. ValueError if `block` does not divide L, or L is
        longer than max_seq_length."""
        if self._need_layout_synchronization and dist.is_initialized():
            dist.broadcast(self.master_layout, src=0)
            self._need_layout_synchronization = False
        block = self.sparsity_config.block
        if L % block:
            raise ValueError(
                f"sequence length {L} is not a multiple of the block size {block}: pad it to {-(-L // block) * block} "
                "(SparseAttentionUtils.pad_to_block_size does)"
            )
        n = L // block
        if n > self.master_layout.shape[-1]:
            raise ValueError(
                f"sequence length {L}: the layout was made for max_seq_length = {self.master_layout.shape[-1] * block}"
            )
        return self.master_layout[..., :n, :n].cpu()

    def plan(self, L: int) -> Plan:
        if L not in self.plans:
            self.plans[L] = Plan(self.get_layout(L))
        return self.plans[L]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rpe: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        """query, value [B, heads, T, D], key likewise or with its last two dimensions exchanged: -> [B, heads, T, D].

        rpe [T, T], [heads, T, T] or [B, heads, T, T] is added to scores. key_padding_mask [B, T], or with dimensions of
        1 between. attn_mask [T, T], or with dimensions of 1 before. NotImplementedError for other keys than queries.
        """
        batch, heads, length, width = query.shape
        if key.shape[2] != length and key.shape[2:] == (width, length):
            key = key.transpose(2, 3)
        if query.shape != key.shape or key.shape != value.shape:
            raise NotImplementedError(
                f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}: only self-attention, "
                "where all are alike"
            )
        if heads != self.sparsity_config.num_heads:
            raise ValueError(f"{heads} heads: the sparsity config was made for {self.sparsity_config.num_heads}")
        key_bias = None
        if key_padding_mask is not None:
            if key_padding_mask.numel() != batch * length:
                raise ValueError(f"key_padding_mask {tuple(key_padding_mask.shape)}: give [batch, tokens]")
            key_bias = added(key_padding_mask.reshape(batch, length), self.key_padding_mask_mode)
        biases = [] if rpe is None else [rpe]
        if attn_mask is not None:
            if attn_mask.numel() != length * length:
                raise ValueError(f"attn_mask {tuple(attn_mask.shape)}: give [tokens, tokens]")
            biases.append(added(attn_mask.reshape(length, length), self.attn_mask_mode))
        block = self.sparsity_config.block
        return block_sparse_attention(query, key, value, self.plan(length), block, key_bias=key_bias, biases=biases)


def _planned_anew(module: SparseSelfAttention, keys: object) -> None:
    """After loading: plans were made of the layout before, whose blocks may have been drawn."""
    module.plans.clear()


def added(mask: Tensor, mode: str) -> Tensor:
    """A mask as what is added to scores."""
    if mode == "add" and mask.dtype != torch.bool:
        return mask
    # A bool mask can only say where, in either mode; torch's own attentions read True as "may".
    return torch.zeros(mask.shape, device=mask.device).masked_fill(mask == 0, -torch.inf)
