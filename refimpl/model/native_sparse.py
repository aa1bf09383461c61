"""Native sparse attention: a coarse look at all blocks says which few to read in full; a window of neighbours besides.

Three attentions over the same queries, each with keys of the past alone, mixed by a gate for each token and head:

    compressed   one key and value a block, its mean: n = T / b keys in place of T
    selected     the `count` past blocks to which the compressed attention of a block of queries gave most, and its own
    window       the last blocks

    FLOPs        4 T n D + 4 T (count + 1 + window) b D for a head: linear in T but for the first, 1/b of dense's
    selection    is shared by a block of queries and by the heads that share a head of keys: blocks are read once (in
                 the paper by these heads alone: each query selects for itself)

The layout is made anew for every sequence, and is no function that has a gradient: what is learned of selection is
learned through the compressed attention, which uses the same scores. Yuan et al. 2025 (arXiv:2502.11089), whose
compression is a small network over overlapping blocks; here it is the mean of blocks that do not overlap.
"""

import math

import torch
from torch import Tensor

from refimpl.model.patterns.parts import window
from refimpl.model.sparse import block_sparse_attention


def compress(x: Tensor, block: int) -> Tensor:
    """The mean of each block: [B, K, T, D] -> [B, K, T / block, D]."""
    return x.unflatten(2, (-1, block)).mean(3)  # type: ignore[no-untyped-call, no-any-return]


def coarse(q: Tensor, k: Tensor, block: int) -> Tensor:
    """Attention of queries [B, H, T, D] to the means of blocks of k [B, K, T, D]: probabilities [B, H, T, n].

    A block is seen by tokens after its end; rows that see none are zeros.
    """
    keys = compress(k, block).repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = q @ keys.transpose(2, 3) * (1 / math.sqrt(q.shape[3]))
    ends = torch.arange(1, keys.shape[2] + 1, device=q.device) * block
    future = torch.arange(q.shape[2], device=q.device)[:, None] < ends
    return torch.softmax(scores.masked_fill(future, torch.finfo(scores.dtype).min), -1).masked_fill(future, 0)


def selected(p: Tensor, block: int, count: int, shared: int = 1) -> Tensor:
    """The layout that coarse attention p [B, H, T, n] asks for: bool [B, H, T / block, n].

    A row reads its own block and, of the blocks before it, the `count` with the largest sum of p over its queries and
    over the `shared` heads of its group (all, if there are fewer).
    """
    batch, heads, _, n = p.shape
    wanted = p.detach().view(batch, heads // shared, shared, n, block, n).sum((2, 4))  # [B, K, rows, n]
    past = torch.ones(n, n, dtype=torch.bool, device=p.device).tril(-1)
    best = wanted.masked_fill(~past, -1).topk(min(count, n), -1).indices
    layout = torch.zeros_like(wanted, dtype=torch.bool).scatter_(-1, best, True) & past
    layout |= torch.eye(n, dtype=torch.bool, device=p.device)
    return layout.repeat_interleave(shared, 1)


def native_sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, gates: Tensor, block: int, *, count: int = 2, near: int = 2
) -> Tensor:
    """q [B, H, T, D], k, v [B, K, T, D], gates [B, H, T, 3] of compressed, selected, window -> [B, H, T, D]; causal.

    near: blocks of the window, one's own among them. ValueError unless `block` divides T.
    """
    if q.shape[2] % block or q.shape[2] != k.shape[2]:
        raise ValueError(
            f"{q.shape[2]} queries and {k.shape[2]} keys: both must be one multiple of the block size {block}"
        )
    shared, n = q.shape[1] // k.shape[1], q.shape[2] // block
    p = coarse(q, k, block)
    means = p @ compress(v, block).repeat_interleave(shared, 1)
    read = selected(p, block, count, shared)
    chosen = block_sparse_attention(q, k, v, read, block, causal=True)
    recent = block_sparse_attention(q, k, v, window(n, 2 * near - 1, ahead=False), block, causal=True)
    g1, g2, g3 = gates.unsqueeze(-2).unbind(-1)  # [B, H, T, 1] each
    return g1 * means + g2 * chosen + g3 * recent
