"""Ulysses: for attention alone, ranks change from some tokens of all heads to all tokens of some heads, and back.

    [B, H, T/N, D]  --all-to-all-->  [B, H/N, T, D]  attention of any kind, also a fused kernel  --all-to-all-->  back

Attention of one head needs no other head, so between the two exchanges nothing is sent. A rank sends (N-1)/N of what it
has of q, k, v and of the output: 4 B T/N H D (N-1)/N elements forward and as many backward, which falls with N, where a
ring's traffic does not. The number of heads bounds N. Heads that N does not divide are dealt out unevenly, the first
ranks having more, who then have more work: 7 heads on 4 ranks are 2, 2, 2, 1. Fewer heads of keys and values than ranks
are repeated. Jacobs et al. 2023, arXiv:2309.14509; DeepSpeed: deepspeed/sequence/layer.py, `DistributedAttention`.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from refimpl.comm.group import Group
from refimpl.parallel.conjugates import conjugate
from refimpl.parallel.split import Split

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # q [B, h, T, D], k, v [B, k, T, D] -> [B, h, T, D]

causal: Attention = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)


def ulysses(q: Tensor, k: Tensor, v: Tensor, group: Group, attention: Attention = causal) -> Tensor:
    """Attention over the whole sequence. q [B, H, T/N, D], k, v [B, K, T/N, D], K a divisor of H -> [B, H, T/N, D].

    Rank r has the r-th run of tokens (a `Layout` that is not zigzag). ValueError for fewer heads than ranks. A
    collective, backward too.
    """
    heads, shared = q.shape[1], k.shape[1]
    each = shared_heads(heads, shared, group.size)
    k, v = (x.repeat_interleave(each // shared, 1) for x in (k, v))
    queries, keys = dealt(heads, each, group.size), dealt(each, each, group.size)
    mine = attention(by_heads(q, group, queries), by_heads(k, group, keys), by_heads(v, group, keys))
    return by_tokens(mine, group, queries)


def shared_heads(heads: int, shared: int, ranks: int) -> int:
    """How many heads of keys and values are dealt out: K, or a multiple that suits the ranks. ValueError if none does.

    First one that all ranks get equally many of, else the smallest of which each gets one.
    """
    multiples = [each for each in range(shared, heads + 1, shared) if heads % each == 0] if heads % shared == 0 else []
    equal, enough = math.lcm(shared, ranks), [each for each in multiples if each >= ranks]
    if not enough:
        raise ValueError(
            f"{heads} heads of queries over {shared} of keys and values cannot be dealt out to {ranks} ranks: use "
            f"ring_attention, or at most {heads} ranks"
        )
    return equal if equal in multiples else enough[0]


def dealt(heads: int, units: int, ranks: int) -> list[int]:
    """Each rank's heads, dealt out in `units` equal parts; the first ranks have more. ValueError for too few."""
    return Split((heads,), units, ranks, "attention heads").sizes


def by_heads(x: Tensor, group: Group, heads: Sequence[int] | None = None) -> Tensor:
    """[B, H, T/N, D] -> [B, heads[rank], T, D]: rank r gets the r-th part of the heads."""
    heads = heads or dealt(x.shape[1], x.shape[1], group.size)
    return exchange(x, group, 1, 2, heads, [x.shape[2]] * group.size)


def by_tokens(x: Tensor, group: Group, heads: Sequence[int] | None = None) -> Tensor:
    """[B, heads[rank], T, D] -> [B, H, T/N, D], the inverse; as many heads on all ranks by default."""
    return exchange(x, group, 2, 1, [x.shape[2] // group.size] * group.size, heads or [x.shape[1]] * group.size)


def exchange(x: Tensor, group: Group, cut: int, join: int, cuts: Sequence[int], joins: Sequence[int]) -> Tensor:
    """`cuts[r]` of x along dimension `cut` go to rank r; what comes, `joins[r]` along `join`, is joined in rank order.

    cuts, joins: the same on all ranks; x has joins[rank] along `join`. ValueError if it has not.
    """
    if x.shape[cut] != sum(cuts) or x.shape[join] != joins[group.rank]:
        raise ValueError(f"rank {group.rank}: {tuple(x.shape)} where dimension {cut} is cut as {list(cuts)}, and "
                         f"dimension {join} joined of {list(joins)}")  # fmt: skip
    there, back = partial(exchanged, group, cut, join, cuts, joins), partial(exchanged, group, join, cut, joins, cuts)
    return conjugate(x, group, there, back)


def exchanged(group: Group, cut: int, join: int, cuts: Sequence[int], joins: Sequence[int], x: Tensor) -> Tensor:
    goes = [part.flatten() for part in torch.split(x, list(cuts), cut)]
    shapes = [[cuts[group.rank] if d == cut else n if d == join else s for d, s in enumerate(x.shape)] for n in joins]
    comes = [math.prod(shape) for shape in shapes]
    out = x.new_empty(sum(comes))
    even = len(set(cuts)) == len(set(joins)) == 1
    ins, outs = (None, None) if even else ([part.numel() for part in goes], comes)
    group.all_to_all(out, torch.cat(goes), in_splits=ins, out_splits=outs, tag="heads and tokens")
    return torch.cat([part.view(shape) for part, shape in zip(torch.split(out, comes), shapes, strict=True)], join)
