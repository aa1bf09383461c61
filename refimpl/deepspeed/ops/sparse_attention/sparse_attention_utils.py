"""What makes a pretrained BERT or RoBERTa sparse, and its sequences a multiple of a block.

DeepSpeed until 0.19.6: deepspeed/ops/sparse_attention/sparse_attention_utils.py.
"""

import warnings
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from refimpl.deepspeed.ops.sparse_attention.bert_sparse_self_attention import BertSparseSelfAttention
from refimpl.model.patterns.base import SparsityConfig
from refimpl.model.patterns.fixed import FixedSparsityConfig

RESERVED = {"bert": 0, "roberta": 2}  # rows of the position table that are no positions


class SparseAttentionUtils:
    """DeepSpeed's static functions."""

    @staticmethod
    def extend_position_embedding(model: Any, max_position: int) -> Any:
        """Repeat the position embeddings of a `model.bert` or `model.roberta` up to max_position, in place.

        ValueError unless it is longer than before, and for another model. (DeepSpeed rounds down to a whole number of
        copies, and so leaves a BERT shorter than asked.)
        """
        name, inner = body(model)
        table, reserved = inner.embeddings.position_embeddings, RESERVED[name]
        old = table.weight.detach()
        before = len(old) - reserved
        if max_position <= before:
            raise ValueError(f"max_position is {max_position}: the model has {before} positions already")
        place = torch.arange(max_position) % before + reserved
        table.weight.data = torch.cat([old[:reserved], old[place]])
        table.num_embeddings = max_position + reserved
        for named in ("position_ids", "token_type_ids"):
            if isinstance(buffer := getattr(inner.embeddings, named, None), Tensor):
                longer = torch.arange(max_position + reserved, device=buffer.device)[None]
                value = longer if named == "position_ids" else torch.zeros_like(longer)
                inner.embeddings.register_buffer(named, value, persistent=False)
        model.config.max_position_embeddings = max_position + reserved
        return model

    @staticmethod
    def update_tokenizer_model_max_length(tokenizer: Any, max_position: int) -> Any:
        """The tokenizer's longest sequence, in place."""
        tokenizer.model_max_length = max_position
        tokenizer.init_kwargs["model_max_length"] = max_position
        return tokenizer

    @staticmethod
    def replace_model_self_attention_with_sparse_self_attention(
        model: Any, max_position: int, sparsity_config: SparsityConfig | None = None
    ) -> Any:
        """A `model.bert` or `model.roberta` whose layers attend to a pattern's blocks; weights are kept. In place.

        ValueError for another model: `refimpl.model.sparse_swap.make_sparse` knows more of them.
        """
        name, inner = body(model)
        model.config.max_position_embeddings = max_position + RESERVED[name]
        SparseAttentionUtils.replace_self_attention_layer_with_sparse_self_attention_layer(
            model.config, inner.encoder.layer, sparsity_config
        )
        return model

    @staticmethod
    def replace_self_attention_layer_with_sparse_self_attention_layer(
        config: Any, layers: Iterable[nn.Module], sparsity_config: SparsityConfig | None = None
    ) -> Iterable[nn.Module]:
        """The same for a list of layers that have `attention.self.query`, `.key` and `.value`.

        ValueError for a decoder's, whose queries do not all see the same tokens.
        """
        if getattr(config, "is_decoder", False):
            raise ValueError("is_decoder: BERT's sparse layers hide nothing of the future: make_sparse knows decoders")
        pattern = sparsity_config or FixedSparsityConfig(num_heads=config.num_attention_heads)
        if getattr(config, "attention_probs_dropout_prob", 0):
            warnings.warn(
                "sparse attention drops no probabilities: attention_probs_dropout_prob has no effect", stacklevel=2
            )
        for layer in layers:
            plain: Any = layer.attention.self  # type: ignore[union-attr]
            sparse = HuggingFaceBert(config, pattern)
            sparse.query, sparse.key, sparse.value = plain.query, plain.key, plain.value
            layer.attention.self = sparse.train(plain.training)  # type: ignore[union-attr]
        return layers

    @staticmethod
    def pad_to_block_size(
        block_size: int,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        token_type_ids: Tensor | None,
        position_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        pad_token_id: int,
        model_embeddings: Any,
    ) -> tuple[int, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Each tensor [B, T, ...] longer, up to a multiple of block_size; what is None stays None.

        -> (number of tokens added, input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds).
        attention_mask gets 0 and must be given if something is added; model_embeddings makes inputs_embeds' own.
        """
        given = input_ids if input_ids is not None else inputs_embeds
        if given is None:
            raise ValueError("give input_ids or inputs_embeds")
        pad = -given.shape[1] % block_size
        if pad:
            if inputs_embeds is not None:
                more = torch.full((len(given), pad), pad_token_id, dtype=torch.long, device=given.device)
                inputs_embeds = torch.cat([inputs_embeds, model_embeddings(more)], dim=1)
            input_ids, position_ids = longer(input_ids, pad, pad_token_id), longer(position_ids, pad, pad_token_id)
            attention_mask, token_type_ids = longer(attention_mask, pad, 0), longer(token_type_ids, pad, 0)
        return pad, input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds

    @staticmethod
    def unpad_sequence_output(pad_len: int, sequence_output: Tensor) -> Tensor:
        """[B, T + pad_len, ...] -> [B, T, ...]."""
        return sequence_output[:, :-pad_len] if pad_len > 0 else sequence_output


class HuggingFaceBert(BertSparseSelfAttention):
    """As transformers calls it: more arguments, and a tuple for an answer."""

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        batch, length = hidden_states.shape[:2]
        if attention_mask is not None and attention_mask.dim() == 4:  # [B, 1, T or 1, T]
            if not attention_mask.equal(attention_mask[:, :, :1].expand_as(attention_mask)):
                raise ValueError("attention_mask: queries see unlike tokens, and here only tokens are hidden, from all")
            attention_mask = attention_mask[:, 0, 0]
        if attention_mask is not None:
            attention_mask = attention_mask.expand(batch, length)
        return super().forward(hidden_states, attention_mask), None


def body(model: Any) -> tuple[str, Any]:
    """("bert" or "roberta", that part of the model). ValueError if it has neither."""
    for name in RESERVED:
        if hasattr(model, name):
            return name, getattr(model, name)
    raise ValueError(f"{type(model).__name__} has neither .bert nor .roberta: these are the models that this knows")


def longer(x: Tensor | None, pad: int, value: int) -> Tensor | None:
    return None if x is None else F.pad(x, (0, pad), value=value)
