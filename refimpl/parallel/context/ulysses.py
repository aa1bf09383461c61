"""Ulysses: for attention alone, ranks change from some tokens of all heads to all tokens of some heads, and back.

    [B, H, T/N, D]  --all-to-all-->  [B, H/N, T, D]  attention of any kind, also a fused kernel  --all-to-all-->  back

Attention of one head needs no other head, so between the two exchanges nothing is sent. A rank sends (N-1)/N of what it
has of q, k, v and of the output: 4 B T/N H D (N-1)/N elements forward and as many backward, which falls with N, where a
ring's traffic does not. The number of heads bounds N. Heads of keys and values that do not divide are repeated until
they do. Jacobs et al. 2023, arXiv:2309.14509; DeepSpeed: deepspeed/sequence/layer.py, `DistributedAttention`.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from refimpl.comm.group import Group

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # q [B, h, T, D], k, v [B, k, T, D] -> [B, h, T, D]

causal: Attention = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)


def ulysses(q: Tensor, k: Tensor, v: Tensor, group: Group, attention: Attention = causal) -> Tensor:
    """Attention over the whole sequence. q [B, H, T/N, D], k, v [B, K, T/N, D], K a divisor of H -> [B, H, T/N, D].

    Rank r has the r-th run of tokens (a `Layout` that is not zigzag). ValueError where H does not divide by N. A
    collective, backward too.
    """
    heads, shared, size = q.shape[1], k.shape[1], group.size
    each = math.lcm(shared, size)  # heads of keys and values that divide
    if heads % size or heads % shared or heads % each:
        raise ValueError(
            f"{heads} heads of queries over {shared} of keys and values cannot be dealt out to {size} ranks: use "
            "ring_attention, or a number of ranks that divides them"
        )
    k, v = (x.repeat_interleave(each // shared, 1) for x in (k, v))
    return by_tokens(attention(*(by_heads(x, group) for x in (q, k, v))), group)


def by_heads(x: Tensor, group: Group) -> Tensor:
    """[B, H, T/N, D] -> [B, H/N, T, D]: rank r gets the r-th part of the heads. ValueError if H does not divide."""
    if x.shape[1] % group.size:
        raise ValueError(f"{x.shape[1]} heads cannot be dealt out to {group.size} ranks")
    result: Tensor = Exchange.apply(x, group, 1, 2)  # type: ignore[no-untyped-call]
    return result


def by_tokens(x: Tensor, group: Group) -> Tensor:
    """[B, H/N, T, D] -> [B, H, T/N, D], the inverse."""
    result: Tensor = Exchange.apply(x, group, 2, 1)  # type: ignore[no-untyped-call]
    return result


class Exchange(torch.autograd.Function):
    """Cuts dimension `cut` into N, and joins what the ranks send along dimension `join`. Backward is the reverse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, cut: int, join: int) -> Tensor:
        ctx.settings = group, cut, join
        return exchanged(x, group, cut, join)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        group, cut, join = ctx.settings
        return exchanged(grads[0], group, join, cut), None, None, None


def exchanged(x: Tensor, group: Group, cut: int, join: int) -> Tensor:
    """Part r of x along `cut` goes to rank r; what comes is joined along `join`, in rank order."""
    parts = torch.stack(x.chunk(group.size, cut))  # [N, ...]
    out = torch.empty_like(parts)
    group.all_to_all(out, parts, tag="heads and tokens")
    return torch.cat(out.unbind(), join)
