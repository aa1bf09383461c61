"""Attention a block at a time: a running softmax forward, and backward from what it leaves, without a [T, T] anywhere.

Of every query three things are kept while keys come by: the largest score m so far, the sum of exp(score - m), and the
values weighted with that. A larger score that comes later scales the old ones down by exp(m - new m). At the end the
weighted values divided by the sum are exact softmax attention, and lse = m + log(sum) is all that backward needs to
compute each probability again. Tiles of TILE x TILE scores bound the memory. Milakov & Gimelshein 2018,
arXiv:1805.02867; Rabe & Staats 2021, arXiv:2112.05682; FlashAttention-2: Dao 2023, arXiv:2307.08691, section 3.1.

    B   sequences          K   heads of keys and values     D   elements of a head
    H   heads of queries   G   H / K: queries that share    Q, S   tokens of queries, of keys
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

TILE = 1024


def grouped(q: Tensor, heads: int) -> Tensor:
    """[B, H, Q, D] -> the view [B, K, G, Q, D]."""
    return q.reshape(q.shape[0], heads, q.shape[1] // heads, *q.shape[2:])


def tiles(length: int) -> Iterator[slice]:
    return (slice(start, min(start + TILE, length)) for start in range(0, length, TILE))


def visible(queries: slice, keys: slice, diagonal: bool) -> bool:
    """Whether any query of a tile sees any key of another."""
    return not diagonal or bool(keys.start < queries.stop)


def scores(q: Tensor, k: Tensor, scale: float, queries: slice, keys: slice, diagonal: bool) -> Tensor:
    """q [B, K, G, Q, D], k [B, K, S, D] -> [B, K, G, q, s] fp32 of one tile, -inf where a query does not look."""
    found = (q[..., queries, :] @ k[:, :, None, keys].mT).float() * scale
    if diagonal and keys.stop > queries.start + 1:
        ahead = torch.ones(found.shape[-2:], dtype=torch.bool, device=found.device)
        found.masked_fill_(ahead.triu(queries.start - keys.start + 1), -torch.inf)
    return found


@dataclass
class Running:
    """The softmax so far of queries [B, K, G, Q, D]."""

    most: Tensor  # [B, K, G, Q, 1] the largest score
    total: Tensor  # [B, K, G, Q, 1] sum of exp(score - most)
    mixed: Tensor  # [B, K, G, Q, D] values, weighted alike

    @classmethod
    def of(cls, q: Tensor) -> "Running":
        """Nothing seen yet."""
        none = torch.zeros((*q.shape[:-1], 1), device=q.device)
        return cls(none - torch.inf, none, torch.zeros(q.shape, device=q.device))

    def see(self, q: Tensor, k: Tensor, v: Tensor, scale: float, here: slice, diagonal: bool) -> None:
        """Let queries q [B, K, G, q, D], which are those of `here`, look at keys and values [B, K, S, D]."""
        for queries in tiles(q.shape[-2]):
            mine = slice(here.start + queries.start, here.start + queries.stop)
            most, total, mixed = (x[..., mine, :] for x in (self.most, self.total, self.mixed))
            for keys in tiles(k.shape[-2]):
                if visible(queries, keys, diagonal):
                    found = scores(q, k, scale, queries, keys, diagonal)
                    larger = torch.maximum(most, found.amax(-1, keepdim=True))
                    weights = found.sub_(larger).exp_()
                    shrink = (most - larger).exp_()
                    total.mul_(shrink).add_(weights.sum(-1, keepdim=True))
                    mixed.mul_(shrink).add_((weights.to(v.dtype) @ v[:, :, None, keys]).float())
                    most.copy_(larger)

    def result(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """-> attention's output [B, H, Q, D], and lse [B, K, G, Q, 1] fp32."""
        return (self.mixed / self.total).to(dtype).flatten(1, 2), self.most + self.total.log()


@dataclass
class Back:
    """Backward of queries [B, K, G, Q, D]: `dq` grows while keys come by."""

    out_grad: Tensor  # [B, K, G, Q, D]
    lse: Tensor  # [B, K, G, Q, 1]
    delta: Tensor  # [B, K, G, Q, 1] sum of out * out_grad: what softmax's backward takes off each row
    dq: Tensor  # [B, K, G, Q, D] fp32

    @classmethod
    def of(cls, q: Tensor, out: Tensor, out_grad: Tensor, lse: Tensor) -> "Back":
        """q [B, K, G, Q, D]; out, out_grad [B, H, Q, D]."""
        out, out_grad = (grouped(x, q.shape[1]) for x in (out, out_grad))
        delta = (out.float() * out_grad.float()).sum(-1, keepdim=True)
        return cls(out_grad, lse, delta, torch.zeros_like(q, dtype=torch.float32))

    def see(
        self, q: Tensor, k: Tensor, v: Tensor, dk: Tensor, dv: Tensor, scale: float, here: slice, diagonal: bool
    ) -> None:
        """As `Running.see`; adds to dk and dv [B, K, S, D] fp32 what these queries have to say."""
        for queries in tiles(q.shape[-2]):
            mine = slice(here.start + queries.start, here.start + queries.stop)
            out_grad, lse, delta, dq = (x[..., mine, :] for x in (self.out_grad, self.lse, self.delta, self.dq))
            for keys in tiles(k.shape[-2]):
                if visible(queries, keys, diagonal):
                    p = scores(q, k, scale, queries, keys, diagonal).sub_(lse).exp_()  # [B, K, G, q, s]
                    dv[:, :, keys] += (p.to(v.dtype).mT @ out_grad).float().sum(2)
                    ds = (out_grad @ v[:, :, None, keys].mT).float().sub_(delta).mul_(p).mul_(scale).to(q.dtype)
                    dq += (ds @ k[:, :, None, keys]).float()
                    dk[:, :, keys] += (ds.mT @ q[..., queries, :]).float().sum(2)
