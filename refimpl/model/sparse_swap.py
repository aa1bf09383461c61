"""A model's attention exchanged for a pattern's, from outside: our GPT's, and transformers' models'.

transformers' attentions are called through a register, by the name in their configuration (`AttentionInterface`); one
function is entered there, and finds the pattern on the module that calls it. Weights and names of parameters stay.
DeepSpeed left this to the model's author: the JSON was read, the layers had to be exchanged by hand.
"""

import importlib
import re
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from refimpl.model.gpt import GPT, Attention, AttentionBy, Block
from refimpl.model.patterns.base import SparsityConfig
from refimpl.model.sparse import SparseAttention

MakePattern = Callable[[int], SparsityConfig]  # from a number of heads
NAME = "refimpl_block_sparse"  # in transformers' register
DROPOUTS = ("attention_probs_dropout_prob", "attn_pdrop", "attention_dropout")
# What a pattern alone would not equal: settings of an attention or of its configuration, and options of its calls.
SETTINGS = ("sliding_window", "attention_chunk_size", "attn_logit_softcapping", "sinks")
OPTIONS = ("sliding_window", "softcap", "s_aux", "position_bias")
CROSS = re.compile(r"cross_?att|encoder_att|encdecatt", re.IGNORECASE)  # as transformers calls those of other sequences


class SparseGPTAttention(AttentionBy):
    """The GPT's causal attention over a pattern's blocks."""


def make_sparse(model: nn.Module, make_pattern: MakePattern) -> int:
    """Exchange every self-attention of `model`, in place: -> how many.

    A causal attention stays causal, whatever the pattern says. Sequences need not be multiples of the block: they are
    padded inside. ValueError for a model that is neither made of the GPT's blocks nor one of transformers', or that has
    attentions of another kind; a UserWarning if it would drop probabilities, which block-sparse attention does not.
    0 of a model whose author has read the JSON and built `SparseSelfAttention` in, as DeepSpeed's bing_bert does.
    """
    if any(isinstance(getattr(module, "sparsity_config", None), SparsityConfig) for module in model.modules()):
        return 0
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    if blocks and all(isinstance(block.attention, Attention) for block in blocks):
        return swap_blocks(model, blocks, make_pattern)
    if not blocks and (pretrained := sys.modules.get("transformers.modeling_utils")) is not None:
        for module in model.modules():  # a wrapper may stand around it
            if isinstance(module, pretrained.PreTrainedModel):
                return swap_registered(module, make_pattern)
    raise ValueError(
        f"sparse_attention: {type(model).__name__} is neither made of refimpl's GPT blocks nor a model of "
        "transformers; build its layers of deepspeed.ops.sparse_attention.SparseSelfAttention"
    )


def swap_blocks(model: nn.Module, blocks: list[Block], make_pattern: MakePattern) -> int:
    context = next((m.config.context for m in model.modules() if isinstance(m, GPT)), None)
    for block in blocks:
        plain: Attention = block.attention
        heads = plain.qkv.out_features // 3 // plain.head_width
        block.attention = SparseGPTAttention(plain, SparseAttention(make_pattern(heads), context, causal=True))  # type: ignore[assignment]
    return len(blocks)


def swap_registered(model: Any, make_pattern: MakePattern) -> int:
    """A PreTrainedModel. Its configuration says how many heads and tokens there are."""
    config, kind = model.config, type(model).__name__
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        raise ValueError(f"sparse_attention: {kind} attends to another sequence; only self-attention can be sparse")
    # Bart's decoder alone has cross-attentions, which run if it is given encoder_hidden_states.
    attentions = [m for name, m in model.named_modules() if hasattr(m, "is_causal") and not CROSS.search(name)]
    none = f"sparse_attention: no attention of {kind} is called through transformers' AttentionInterface"
    if not attentions:
        raise ValueError(none)
    for module in attentions:
        refuse_others(module, {name: getattr(module, name, getattr(config, name, None)) for name in SETTINGS})
    if not model._supports_flash_attn:
        raise ValueError(
            f"sparse_attention: the attention of {kind} must be told more than causality and padding, as transformers "
            "runs it by no flash attention either"
        )
    if any(getattr(config, name, 0) for name in DROPOUTS):
        warnings.warn(
            f"sparse_attention drops no probabilities: {kind}'s dropout of attention has no effect", stacklevel=2
        )
    masks = importlib.import_module("transformers.masking_utils")
    importlib.import_module("transformers").AttentionInterface.register(NAME, attention_function)
    masks.AttentionMaskInterface.register(NAME, partial(key_mask, masks))
    model.set_attn_implementation(NAME)
    if config._attn_implementation != NAME:  # transformers only logs it
        raise ValueError(none)
    longest = getattr(config, "max_position_embeddings", None)
    for module in attentions:
        module.block_sparse = SparseAttention(make_pattern(config.num_attention_heads), longest, bool(module.is_causal))
    return len(attentions)


def key_mask(masks: Any, *, mask_function: Any, **given: Any) -> Tensor | None:
    """Which keys are padding: [B, T], or None. What is not just causal or full has 4 dimensions, and is refused where
    it is used.
    """
    plain = mask_function in (masks.causal_mask_function, masks.bidirectional_mask_function)
    made: Tensor | None = (masks.flash_attention_mask if plain else masks.sdpa_mask)(
        mask_function=mask_function, **given
    )
    return made


def refuse_others(module: nn.Module, settings: dict[str, Any]) -> None:
    """ValueError unless all are None, or 0, which Qwen2-MoE writes."""
    for name, value in settings.items():
        if isinstance(value, Tensor) or value:
            raise ValueError(
                f"sparse_attention: {type(module).__name__} asks for {name}, which a pattern does not have: set it to "
                "None in the model's configuration, or leave sparse_attention out"
            )


def attention_function(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """What transformers calls: query [B, H, T_q, D], key [B, K, T_k, D], value [B, K, T_k, V], V at most D ->
    ([B, T_q, H, V], None).
    """
    if not hasattr(module, "block_sparse"):
        raise ValueError(
            f"sparse_attention: {type(module).__name__} was given another sequence to attend to; only self-attention "
            "can be sparse: leave sparse_attention out, or encoder_hidden_states"
        )
    refuse_others(module, {name: options.get(name) for name in OPTIONS})
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError(
            f"attention_mask {tuple(attention_mask.shape)}: sparse attention takes [batch, tokens]; packed sequences "
            "(position_ids that begin anew), prefixes and other masks of single tokens are none that a pattern has"
        )
    wider = max(0, query.shape[-1] - value.shape[-1])  # DeepSeek's values are narrower than its keys
    out = module.block_sparse(query, key, F.pad(value, (0, wider)), attention_mask, options.get("scaling"))
    return out[..., : value.shape[-1]].transpose(1, 2).contiguous(), None
