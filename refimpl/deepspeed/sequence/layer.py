"""`DistributedAttention`: DeepSpeed's Ulysses in its own shapes and words, over `parallel/context/ulysses.py`.

A rank has [T/N, B, H, D] with batch_dim_idx=1, or [B, T/N, H, D] with 0. `local_attn` is called with all T tokens of
some heads; what it returns may have its heads flattened, [T, B, H D]. Heads that N does not divide are dealt out as
DeepSpeed deals them. Differences: heads of keys and values may be fewer than those of queries, also where N does not
divide them; nothing is remembered between calls (DeepSpeed keeps the first call's number of heads for the process).
DeepSpeed: deepspeed/sequence/layer.py.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from refimpl.comm.group import Group
from refimpl.comm.streams import told
from refimpl.parallel.context.ulysses import dealt, exchange, shared_heads

HEADS = 2  # the dimension that has them


class DistributedAttention(nn.Module):
    """`local_attention(q, k, v, *args)` over the tokens of all ranks of a group."""

    def __init__(
        self,
        local_attention: Callable[..., Tensor],
        sequence_process_group: ProcessGroup | None,
        scatter_idx: int = HEADS,
        gather_idx: int = 0,
        sp_stream: Any = None,
        num_kv_heads: int | None = None,
    ) -> None:
        """gather_idx: DeepSpeed's; the dimension of the tokens follows from the batch's, which each call names.

        ValueError for another scatter_idx than 2. sp_stream: not needed; exchanges run on the group's own stream.
        num_kv_heads: not needed either, keys say it; ValueError in a call whose keys have another number.
        """
        super().__init__()
        if scatter_idx != HEADS:
            raise ValueError(f"scatter_idx is {scatter_idx}: the heads are dimension {HEADS} of q, k and v")
        self.local_attn, self.spg = local_attention, sequence_process_group
        self.scatter_idx, self.gather_idx, self.num_kv_heads = scatter_idx, gather_idx, num_kv_heads
        self._made: tuple[ProcessGroup, Group] | None = None

    @property
    def group(self) -> Group:
        """Made once, as each takes a stream and a tenth of a millisecond; of all ranks, who may join anew, anew."""
        if self.spg is None:
            return group_of(None)
        if self._made is None or self._made[0] is not self.spg:
            self._made = self.spg, group_of(self.spg)
        return self._made[1]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch_dim_idx: int,
        rotary_pos_emb: tuple[Tensor, Tensor] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """This rank's tokens -> attention's output for them, in the same shape as query. A collective, backward too.

        rotary_pos_emb: cosines and sines of all T tokens, [B, T, 1, D]. ValueError for heads that cannot be dealt out.
        """
        group, tokens = self.group, tokens_of(batch_dim_idx)
        heads, shared = query.shape[HEADS], key.shape[HEADS]
        if shared != (self.num_kv_heads or shared):
            raise ValueError(f"num_kv_heads is {self.num_kv_heads}, and the keys have {shared} heads")
        each = shared_heads(heads, shared, group.size)
        queries, keys = dealt(heads, each, group.size), dealt(each, each, group.size)
        here = [query.shape[tokens]] * group.size
        key, value = (x.repeat_interleave(each // shared, HEADS) for x in (key, value))
        q = exchange(query, group, HEADS, tokens, queries, here)
        k, v = (exchange(x, group, HEADS, tokens, keys, here) for x in (key, value))
        if rotary_pos_emb is not None:
            cosines, sines = (x.transpose(0, 1) if tokens == 0 else x for x in rotary_pos_emb)
            q, k = rotated(q, cosines, sines), rotated(k, cosines, sines)
        out = self.local_attn(q, k, v, *args, **kwargs)
        flat = out.dim() == 3
        if flat:
            out = out.view(*out.shape[:HEADS], queries[group.rank], -1)
        out = exchange(out, group, tokens, HEADS, here, queries)
        return out.flatten(HEADS) if flat else out


class _SeqAllToAll:
    """DeepSpeed's function by its own name, for who calls it without the class above."""

    @staticmethod
    def apply(group: ProcessGroup | None, x: Tensor, scatter_idx: int, gather_idx: int, batch_dim_idx: int) -> Tensor:
        """scatter_idx 2: some tokens of all heads -> all tokens of some heads. Else back; the ranks then tell each
        other how many heads they have."""
        ranks, tokens = group_of(group), tokens_of(batch_dim_idx)
        if scatter_idx == HEADS:
            heads = x.shape[HEADS]
            return exchange(x, ranks, HEADS, tokens, dealt(heads, heads, ranks.size), [x.shape[tokens]] * ranks.size)
        counts = torch.empty(ranks.size, dtype=torch.int64, device=x.device)
        ranks.all_gather(counts, told([x.shape[HEADS]], torch.int64, x.device))
        return exchange(x, ranks, tokens, HEADS, [x.shape[tokens] // ranks.size] * ranks.size, counts.tolist())


def group_of(handle: ProcessGroup | None) -> Group:
    """None is all ranks, as in torch. Without shared memory, of which they would have to agree at every call."""
    return Group.world(transport="gloo") if handle is None else Group(handle, transport="gloo")


def tokens_of(batch_dim_idx: int) -> int:
    """The dimension of the tokens. ValueError for a batch that is neither first nor second.

    TypeError for a tensor: callers written for DeepSpeed before 0.14.5 hand over the mask in its place.
    """
    if isinstance(batch_dim_idx, Tensor):
        raise TypeError(
            "batch_dim_idx is a tensor, and should be the batch's dimension, 0 or 1. What the local attention takes, "
            "such as a mask, comes after rotary_pos_emb: attention(q, k, v, batch_dim_idx, None, mask)"
        )
    if batch_dim_idx not in (0, 1):
        raise ValueError(f"batch_dim_idx is {batch_dim_idx}: it must be 0 or 1, the other is the sequence")
    return 1 - batch_dim_idx


def rotated(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotary positions on the first features, as many as the cosines have. Su et al. 2021, arXiv:2104.09864."""
    turned, left = x.split([cosines.shape[-1], x.shape[-1] - cosines.shape[-1]], -1)  # type: ignore[no-untyped-call]
    first, second = turned.chunk(2, -1)
    return torch.cat([turned * cosines + torch.cat([-second, first], -1) * sines, left], -1)
