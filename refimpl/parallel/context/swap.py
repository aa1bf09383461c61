"""A plain model over part of a sequence: its attention is swapped from outside, nothing else of it knows.

All layers but attention look at one token at a time, so they run as they are on the tokens that a rank has. Parameters
are whole on every rank, and each rank's gradients are of its own tokens: the data-parallel group is the ranks of all
sequences, and the loss is `loss.cross_entropy`. For transformers' models `attention_function` goes into their register
of attentions; DeepSpeed's `UlyssesSPAttentionHF.register_with_transformers` does the same.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from refimpl.comm.group import Group
from refimpl.model.gpt import GPT, AttentionBy
from refimpl.parallel.context.layout import Layout
from refimpl.parallel.context.ring import ring_attention
from refimpl.parallel.context.ulysses import ulysses

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q [B, H, T/N, D], k, v [B, K, T/N, D] -> [B, H, T/N, D]


def attend(group: Group, layout: Layout, how: str, scale: float | None = None) -> Attend:
    """Causal attention over the ranks' tokens; `how`: "ring" or "ulysses". ValueError for a zigzag of the latter."""
    if how == "ring":
        return lambda q, k, v: ring_attention(q, k, v, group, layout, scale=scale)
    if how != "ulysses" or layout.zigzag:
        raise ValueError(f"{how!r} over {layout}: use 'ring', or 'ulysses' over a layout without zigzag")
    attention = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True, scale=scale)
    return lambda q, k, v: ulysses(q, k, v, group, attention)


class ContextAttention(AttentionBy):
    """The GPT's attention of a rank's tokens, x [B, T/N, C], over all ranks' tokens."""


def context_parallel(model: GPT, group: Group, layout: Layout, how: str = "ring") -> GPT:
    """From now on `model` is called with this rank's tokens, `layout.cut(tokens, group.rank)`. The same object."""
    positions = layout.positions(group.rank).to(group.device)
    model.wpe.register_forward_pre_hook(lambda _, args: (positions[: args[0].numel()],))
    for block in model.blocks:
        block.attention = ContextAttention(block.attention, attend(group, layout, how))  # type: ignore[arg-type]
    return model


def attention_function(group: Group, layout: Layout, how: str = "ring") -> Callable[..., tuple[Tensor, None]]:
    """An attention in the shape that transformers' `AttentionInterface.register` takes.

    The model is called with `input_ids` and `position_ids` of this rank's tokens. ValueError for dropout, for which the
    ranks would draw different numbers, and for what is not causal attention over all tokens before.
    """

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        if options.get("dropout"):
            raise ValueError("attention over ranks has no dropout: set attention_dropout = 0")
        causal = options.get("is_causal")  # None: whatever the module says
        asked = {
            "a mask": attention_mask is not None,
            "attention both ways": not (getattr(module, "is_causal", True) if causal is None else causal),
            "a sliding window": options.get("sliding_window") not in (None, 0),
            "a softcap": options.get("softcap") is not None,
        }
        if unknown := [what for what, is_asked in asked.items() if is_asked]:
            raise ValueError(f"attention over ranks is causal, over all tokens: {unknown[0]} is not known here")
        return attend(group, layout, how, options.get("scaling"))(query, key, value).transpose(1, 2), None

    return attention
