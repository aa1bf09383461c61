"""A long sequence in tiles, by DeepSpeed's names: what one tile needs in between is all that is ever in memory.

    TiledMLP.apply(fn, self, x, shards, params)                                 y = fn(self, x)
    TiledFusedLogitsLoss.apply(fn, self, x, y, mask, shards, params, "mean")    the mean, or sum, of the tiles' losses
    sequence_tiled_compute(fn, seqlen, shards, to_shard, to_pass, ...)          any fn of keywords

Each tile is a checkpoint: it runs again in backward, and keeps its input until then. Autograd adds a weight's gradients
of all tiles before any stage sees them, so `compute_params`, which DeepSpeed marks until the last tile, has no effect.
DeepSpeed: deepspeed/runtime/sequence_parallel/ulysses_sp.py, where the loss runs backward inside its forward. Bekman et
al. 2025, arXiv:2506.13996, section 3.2.
"""

from collections.abc import Callable, Mapping
from functools import partial
from math import ceil
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

REDUCTIONS: dict[str | None, Callable[[Tensor], Tensor]] = {None: lambda x: x, "mean": torch.mean, "sum": torch.sum}

again = partial(checkpoint, use_reentrant=False)


class TiledMLP:
    """`apply` is all there is of it here."""

    @staticmethod
    def apply(fn: Callable[..., Any], self: Any, x: Tensor, shards: int, compute_params: Any = None) -> Tensor:
        """fn(self, x) in `shards` tiles of x [..., T, D], cut along T."""
        return torch.cat([again(fn, self, tile) for tile in x.chunk(shards, dim=-2)], dim=-2)


class TiledFusedLogitsLoss:
    """`apply` is all there is of it here."""

    @staticmethod
    def apply(
        fn: Callable[..., Any],
        self: Any,
        x: Tensor,
        y: Tensor,
        mask: Tensor | None,
        shards: int,
        compute_params: Any = None,
        output_reduction: str = "mean",
    ) -> Tensor:
        """x [B, T, ...], y [B, T, ...] and mask [B, T], if any, in tiles of rows. -> the mean of fn's losses, or sum.

        fn(self, x, y) or, with a mask, fn(self, x, y, mask) gives the loss of a tile. Where tiles have unequally many
        targets, let it give a sum, and divide the sum of all. ValueError for shapes that do not fit.
        """
        reduce = reduction(output_reduction, "mean", "sum")
        if x.dim() < 2 or x.shape[:2] != y.shape[:2] or (mask is not None and mask.shape != x.shape[:2]):
            given = [list(t.shape) for t in (x, y, mask) if t is not None]
            raise ValueError(f"TiledFusedLogitsLoss: x, y and mask must begin with the same [B, T], not {given}")
        parts = [t.flatten(0, 1).chunk(shards) for t in (x, y, mask) if t is not None]
        return reduce(torch.stack([again(fn, self, *tile) for tile in zip(*parts, strict=True)]))


def sequence_tiled_compute(
    fn: Callable[..., Any],
    seqlen: int,
    shards: int,
    kwargs_to_shard: Mapping[str, Tensor],
    kwargs_to_pass: Mapping[str, Any],
    grad_requiring_tensor_key: str | None = None,
    compute_params: Any = None,
    output_unshard_dimension: int = 1,
    output_reduction: str | None = "mean",
) -> Tensor:
    """fn of tiles of `kwargs_to_shard`, [B, seqlen, ...] each, and of `kwargs_to_pass` as they are.

    What the tiles give is joined along `output_unshard_dimension`, scalars by 0, and reduced: "mean", "sum" or None.
    """
    reduce, step = reduction(output_reduction, *REDUCTIONS), ceil(seqlen / shards)
    tiles = zip(*(torch.split(v, step, dim=1) for v in kwargs_to_shard.values()), strict=True)
    outputs = [again(partial(fn, **dict(zip(kwargs_to_shard, tile, strict=True)), **kwargs_to_pass)) for tile in tiles]
    join = torch.stack if output_unshard_dimension == 0 else torch.cat
    return reduce(join(outputs, output_unshard_dimension))


def reduction(name: str | None, *allowed: str | None) -> Callable[[Tensor], Tensor]:
    """ValueError for another name."""
    if name not in allowed:
        raise ValueError(f"output_reduction={name!r}: must be one of {', '.join(map(repr, allowed))}")
    return REDUCTIONS[name]
