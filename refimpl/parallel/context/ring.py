"""Ring attention: a rank keeps its queries, and the keys and values of all ranks come by.

N ranks, each with T/N tokens. In each of N rounds a rank lets its queries look at the keys and values it has, while
they are already on their way to its right neighbour and the next ones come. Backward sends them round again, with the
gradients that belong to them, which need one hop more to be home: while a rank computes what it adds to those of one
block, the sum of the ranks before comes in.

    sent a rank, forward     2 (N-1)        tensors of keys, or of values: [B, K, T/N, D]
    backward                 2 (N-1) + 2 N  the gradients in fp32
    kept between them        the output, and a number for each query, beside q, k and v
    memory a rank, forward   6 tensors and 4 numbers a query: keys and values here and coming, two outputs
    backward                 15.5 and 1: those, what came and what goes of the gradients, and the block's own

A block is computed by torch's kernel where there is one (`fused.py`, of which the memory is told, for as many heads of
keys as of queries, the transport's copy of a message not counted), else tile by tile (`blocks.py`). Either way it is
O(T/N), and nowhere O(T^2).
Any number of heads, also fewer than ranks, where `ulysses` ends. With a zigzag layout every rank has the same work.
Ring attention: Liu et al. 2023, arXiv:2310.01889.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from refimpl.comm.group import Group
from refimpl.comm.work import Work
from refimpl.parallel.context.blocks import Back, Running, grouped
from refimpl.parallel.context.fused import FusedBack, FusedRunning, can_fuse
from refimpl.parallel.context.layout import Layout


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Group,
    layout: Layout,
    causal: bool = True,
    scale: float | None = None,
    fused: bool | None = None,
) -> Tensor:
    """Attention over the whole sequence. q [B, H, T/N, D], k, v [B, K, T/N, D], K a divisor of H -> [B, H, T/N, D].

    Each rank passes its tokens' as `layout` says. `scale`: 1/sqrt(D) by default. `fused`: by torch's kernel, where
    there is one by default, else tile by tile. A collective, backward too, which has no gradient itself (RuntimeError).
    ValueError for other shapes.
    """
    if layout.ranks != group.size or q.shape[2] != layout.here or k.shape[2] != layout.here:
        raise ValueError(
            f"rank {group.rank}: {q.shape[2]} queries and {k.shape[2]} keys, where {layout} over {group.size} ranks "
            f"wants {layout.length // group.size}"
        )
    if q.shape[1] % k.shape[1] or k.shape != v.shape:
        raise ValueError(f"{q.shape[1]} heads of queries over keys {tuple(k.shape)} and values {tuple(v.shape)}")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    fused = can_fuse(q) if fused is None else fused
    result: Tensor = Ring.apply(q, k, v, group, layout, causal, scale, fused)  # type: ignore[no-untyped-call]
    return result


class Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: Group, layout: Layout, causal: bool, scale: float, fused: bool
    ) -> Tensor:
        queries, here = grouped(q, k.shape[1]), torch.stack([k, v])  # [2, B, K, T/N, D]
        running = FusedRunning.of(queries) if fused else Running.of(queries)
        for number in range(group.size):
            coming = to_the_right(group, here, "keys and values") if number < group.size - 1 else None
            if block := layout.block(group.rank, (group.rank - number) % group.size, causal):
                mine, theirs, diagonal = block
                group.ledger.mark("attention")
                keys, values = here[0, :, :, theirs], here[1, :, :, theirs]
                running.see(queries[..., mine, :], keys, values, scale, mine, diagonal)
                del keys, values  # or they would stay while the next ones come
            if coming:
                here = coming.wait()
        out, lse = running.result(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.settings = group, layout, causal, scale, fused
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        group, layout, causal, scale, fused = ctx.settings
        queries, here = grouped(q, k.shape[1]), torch.stack([k, v])
        back = (FusedBack if fused else Back).of(queries, out, grads[0], lse)
        there: Coming | None = None  # the gradients of `here`, from the ranks that had it before
        for number in range(group.size):
            coming = to_the_right(group, here, "keys and values") if number < group.size - 1 else None
            found = torch.zeros(here.shape, dtype=lse.dtype, device=here.device)  # what this rank adds to them
            if block := layout.block(group.rank, (group.rank - number) % group.size, causal):
                mine, theirs, diagonal = block
                group.ledger.mark("attention, backward")
                keys, values, dk, dv = (x[i, :, :, theirs] for x in (here, found) for i in range(2))
                back.see(queries[..., mine, :], keys, values, dk, dv, scale, mine, diagonal)
                del keys, values, dk, dv
            if there:
                found += there.wait()
            there = to_the_right(group, found, "gradients of keys and values")
            if coming:
                here = coming.wait()
        assert there is not None
        dk, dv = there.wait().to(k.dtype)
        return back.dq.to(q.dtype).flatten(1, 2), dk, dv, *[None] * 5


class Coming(NamedTuple):
    """What the rank before sends, on its way."""

    out: Tensor
    work: Work | None

    def wait(self) -> Tensor:
        if self.work:
            self.work.wait()
        return self.out


def to_the_right(group: Group, x: Tensor, tag: str) -> Coming:
    """x begins to go to the next rank, what the one before sends begins to come. x must stay as it is meanwhile.

    All ranks do it at once, so it is an all-to-all, in which each rank has something for one other only: unlike a
    message between two, it goes through shared memory where the ranks have it.
    """
    if group.size == 1:
        return Coming(x, None)
    out, to, source = torch.empty_like(x), [0] * group.size, [0] * group.size
    to[(group.rank + 1) % group.size] = source[(group.rank - 1) % group.size] = x.numel()
    work = group.all_to_all(out.view(-1), x.view(-1), in_splits=to, out_splits=source, async_op=True, tag=tag)
    return Coming(out, work)
