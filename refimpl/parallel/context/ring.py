"""Ring attention: a rank keeps its queries, and the keys and values of all ranks come by.

N ranks, each with T/N tokens. In each of N rounds a rank lets its queries look at the keys and values it has (see
blocks.py), and hands them to its right neighbour. Backward sends them round again, with the gradients that belong to
them, which need one hop more to be home.

    sent a rank, forward     2 (N-1)        tensors of keys, or of values: [B, K, T/N, D]
    backward                 2 (N-1) + 2 N  the gradients in fp32
    memory a rank            4 such tensors forward, 8 backward, and a tile of scores: O(T/N), nowhere O(T^2)

Any number of heads, also fewer than ranks, where `ulysses` ends. With a zigzag layout every rank has the same work.
Ring attention: Liu et al. 2023, arXiv:2310.01889.
"""

from typing import Any

import torch
from torch import Tensor

from refimpl.comm.group import Group
from refimpl.parallel.context.blocks import Back, Running, grouped
from refimpl.parallel.context.layout import Layout


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Group,
    layout: Layout,
    causal: bool = True,
    scale: float | None = None,
) -> Tensor:
    """Attention over the whole sequence. q [B, H, T/N, D], k, v [B, K, T/N, D], K a divisor of H -> [B, H, T/N, D].

    Each rank passes its tokens' as `layout` says. `scale`: 1/sqrt(D) by default. A collective, backward too.
    """
    if layout.ranks != group.size or q.shape[2] != layout.here or k.shape[2] != layout.here:
        raise ValueError(
            f"rank {group.rank}: {q.shape[2]} queries and {k.shape[2]} keys, where {layout} over {group.size} ranks "
            f"wants {layout.length // group.size}"
        )
    if q.shape[1] % k.shape[1] or k.shape != v.shape:
        raise ValueError(f"{q.shape[1]} heads of queries over keys {tuple(k.shape)} and values {tuple(v.shape)}")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    result: Tensor = Ring.apply(q, k, v, group, layout, causal, scale)  # type: ignore[no-untyped-call]
    return result


class Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: Group, layout: Layout, causal: bool, scale: float
    ) -> Tensor:
        queries, here = grouped(q, k.shape[1]), torch.stack([k, v])  # [2, B, K, T/N, D]
        running = Running.of(queries)
        for number in range(group.size):
            owner = (group.rank - number) % group.size
            for mine, theirs, diagonal in layout.pairs(group.rank, owner, causal):
                keys, values = here[:, :, :, theirs.here]
                running.see(queries[..., mine.here, :], keys, values, scale, mine.here, diagonal)
            if number < group.size - 1:
                here = to_the_right(group, here, "keys and values")
        out, lse = running.result(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.settings = group, layout, causal, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        group, layout, causal, scale = ctx.settings
        queries, here = grouped(q, k.shape[1]), torch.stack([k, v])
        back = Back.of(queries, out, grads[0], lse)
        there = torch.zeros(here.shape, dtype=torch.float32, device=here.device)  # gradients of `here`
        for number in range(group.size):
            owner = (group.rank - number) % group.size
            for mine, theirs, diagonal in layout.pairs(group.rank, owner, causal):
                (keys, values), (dk, dv) = here[:, :, :, theirs.here], there[:, :, :, theirs.here]
                back.see(queries[..., mine.here, :], keys, values, dk, dv, scale, mine.here, diagonal)
            if number < group.size - 1:
                here = to_the_right(group, here, "keys and values")
            there = to_the_right(group, there, "gradients of keys and values")
        dk, dv = there.to(k.dtype)
        return back.dq.to(q.dtype).flatten(1, 2), dk, dv, None, None, None, None


def to_the_right(group: Group, x: Tensor, tag: str) -> Tensor:
    """x goes to the next rank; what the one before sends comes back."""
    if group.size == 1:
        return x
    out = torch.empty_like(x)
    group.send_recv(x, (group.rank + 1) % group.size, out, (group.rank - 1) % group.size, tag=tag)
    return out
