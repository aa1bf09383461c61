"""Block-sparse attention: softmax(q k^T) v over the blocks that a layout names, and over no other.

Flash attention whose walk over the keys follows a list (`block_lists`): one kernel for every pattern. With R blocks of
b x b present in all heads of a batch of one, heads D wide, elements of e bytes, B sequences:

    FLOPs     forward 4 B R b^2 D, backward 10 asked for and 14 done: density times dense attention's
    bytes     forward q, out, lse once; k and v 2 b D e for each block present; backward: see flash_attention
    memory    out and lse; no scores

The limit is the matrix unit from blocks of 64 on. Blocks of 16 or 32 give it tiles that are too small (no warpgroup
product, which takes 64 rows): expect a fraction of the speed, as DeepSpeed's kernels had with the same block sizes.

DeepSpeed had three kernels that wrote and read the scores of the blocks present: deepspeed/ops/sparse_attention/
matmul.py and softmax.py (gone in 0.19.7). Child et al. 2019 (arXiv:1904.10509), Dao et al. 2022 (arXiv:2205.14135).
Not run on a GPU by its authors.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from refimpl.kernels.block_lists import BlockLists
from refimpl.kernels.block_sparse_kernels import block_sparse_backward, block_sparse_forward
from refimpl.kernels.case import Case, short
from refimpl.kernels.checks import autocast, whole
from refimpl.kernels.flash_shapes import Shapes, check_heads, check_scale, readable
from refimpl.kernels.language import on, once_differentiable, takes

BLOCKS = (16, 32, 64, 128)


def block_sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: Tensor | BlockLists, block: int, *,
    causal: bool = False, scale: float | None = None,
) -> Tensor:  # fmt: skip
    """q [B, H, T, D], k and v [B, H / G, S, D] -> [B, H, T, D] in q's dtype; T and S multiples of `block`.

    layout: [H, T / block, S / block] or [1, ...] or without the first, true where a block of keys is read; or its
    `BlockLists`, made once. block: 16, 32, 64 or 128. causal: a token sees none after it, the last query and the last
    key being one token. A query that sees nothing gets zeros. On a CPU this is torch's masked attention, which skips no
    block (refimpl/model/sparse.py has a path that does).
    """
    q, k, v = autocast(q, k, v)
    check_heads("block_sparse_attention", q, k, v)
    check_blocks(q, k, layout, block)
    scale = check_scale(scale, q.shape[3])
    if min(q.numel(), k.numel()) == 0 or not takes(q, k, v):
        return reference(q, k, v, layout, block, causal=causal, scale=scale)
    found = layout if isinstance(layout, BlockLists) else BlockLists.of(layout.to(q.device), causal)
    if found.causal != causal:
        raise ValueError(f"these lists were made for causal={found.causal}, the call says causal={causal}")
    with on(q):
        out: Tensor = BlockSparse.apply(q, k, v, found, block, scale)  # type: ignore[no-untyped-call]
    return out.view(q.shape[0], q.shape[2], *out.shape[1:]).transpose(1, 2)


def check_blocks(q: Tensor, k: Tensor, layout: Tensor | BlockLists, block: int) -> None:
    """Raise TypeError or ValueError unless the layout fits q and k."""
    whole("block_sparse_attention", block=block)
    if not isinstance(layout, Tensor | BlockLists):
        raise TypeError(f"the layout is a {type(layout).__name__}; it must be a tensor or BlockLists")
    if block not in BLOCKS:
        raise ValueError(f"block is {block}: it must be one of {', '.join(map(str, BLOCKS))}")
    for name, x in (("queries", q), ("keys", k)):
        if x.shape[2] % block:
            raise ValueError(f"{x.shape[2]} {name} are not a multiple of the block size {block}: pad them")
    shape = tuple(layout.shape)
    needed = (q.shape[2] // block, k.shape[2] // block)
    if len(shape) not in (2, 3) or shape[-2:] != needed or (len(shape) == 3 and shape[0] not in (1, q.shape[1])):
        raise ValueError(f"the layout is {list(shape)}: [{q.shape[1]} (or 1), {needed[0]}, {needed[1]}] is needed")


def reference(
    q: Tensor, k: Tensor, v: Tensor, layout: Tensor | BlockLists, block: int, *, causal: bool = False, scale: float
) -> Tensor:
    """torch's masked dense attention."""
    if min(q.numel(), k.numel()) == 0:  # zeros that know their inputs
        return q.masked_fill(torch.ones((), dtype=torch.bool, device=q.device), 0) + k.sum() + v.sum()
    there = dense(layout) if isinstance(layout, BlockLists) else layout.to(q.device).bool()
    sees = there.reshape(-1, *there.shape[-2:]).repeat_interleave(block, 1).repeat_interleave(block, 2)
    if causal:
        sees = sees.tril(k.shape[2] - q.shape[2])
    some = sees.any(2, keepdim=True)
    group = q.shape[1] // k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, (sees | ~some)[None], scale=scale, enable_gqa=group > 1)
    return torch.where(some, out, 0)


def dense(found: BlockLists) -> Tensor:
    """The layout [heads, rows, columns] bool that these lists were made of, without what causality left out."""
    layout = torch.zeros(found.shape, dtype=torch.bool, device=found.by_queries.blocks.device)
    row = torch.repeat_interleave(found.by_queries.starts.diff())
    layout.flatten(0, 1)[row, found.by_queries.blocks.long()] = True
    return layout


class BlockSparse(torch.autograd.Function):
    """The kernels as one operation of autograd; out is [B T, H, D]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, found: BlockLists, block: int, scale: float) -> Tensor:
        q, k, v = readable(q), readable(k), readable(v)
        shapes = Shapes.of(q, k, -1, -1, scale)
        out, lse = block_sparse_forward(q, k, v, shapes, found, block)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.shapes, ctx.found, ctx.block = shapes, found, block
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        grads = block_sparse_backward(g.contiguous(), q, k, v, out, lse, ctx.shapes, ctx.found, ctx.block)
        return *(x.view(len(q), -1, *x.shape[1:]).transpose(1, 2) for x in grads), None, None, None


def _case(dtype: torch.dtype, heads: int, tokens: int, width: int, block: int, window: int) -> Case:
    """A causal local window of `window` blocks."""
    rows, e = tokens // block, dtype.itemsize
    layout = torch.ones(heads, rows, rows, dtype=torch.bool).tril().triu(1 - window)
    lists = BlockLists.of(layout, causal=True)
    flops = 4 * lists.present * block * block * width
    size = heads * tokens * width * e

    def inputs(device: torch.device) -> tuple[Any, ...]:
        made = (torch.randn(1, tokens, heads, width, device=device, dtype=dtype) for _ in "qkv")
        return *(x.transpose(1, 2).detach().requires_grad_() for x in made), lists.to(device)

    def call(q: Tensor, k: Tensor, v: Tensor, found: BlockLists) -> Tensor:
        return block_sparse_attention(q, k, v, found, block, causal=True)

    def oracle(q: Tensor, k: Tensor, v: Tensor, found: BlockLists) -> Tensor:
        return reference(q, k, v, found, block, causal=True, scale=width**-0.5)

    moved = 4 * size + 4 * tokens * heads
    return Case(
        f"block_sparse_attention {short(dtype)} {heads}x{tokens}x{width} block {block}", call, oracle, inputs, moved,
        moved_backward=8 * size + 4 * tokens * heads, flops=flops, flops_backward=flops * 5 // 2,
    )  # fmt: skip


CASES = (
    _case(torch.bfloat16, 8, 8192, 64, 64, 8),
    _case(torch.bfloat16, 8, 8192, 128, 128, 4),
    _case(torch.bfloat16, 4, 4096, 256, 64, 8),
)
SMALL = (_case(torch.float32, 2, 512, 64, 64, 2),)
