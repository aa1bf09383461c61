"""A parted vocabulary's head and loss in one, whose logits are never all there: some rows at a time.

Each chunk of C rows makes its logits [C, V/N], takes their loss (all-reduces of 3 C numbers) and forgets them: it is a
checkpoint, which runs again in backward, exchanges included. Unless it is said, C is such that a chunk weighs about
what `hidden` does. Weight and hidden are cut from fp32 copies: what chunks and ranks ask of them is added up in fp32.
DeepSpeed: deepspeed/sequence/linear_cross_entropy.py, whose backward goes by blocks of the vocabulary, and exchanges
nothing but the gradient of `hidden`. For one process: `refimpl.kernels.linear_cross_entropy`.
"""

from math import ceil
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from refimpl.deepspeed.runtime.sequence_parallel.tiled import again
from refimpl.deepspeed.sequence.cross_entropy import Bounds, bounds_of, each_loss, reduced
from refimpl.deepspeed.sequence.layer import group_of
from refimpl.parallel.conjugates import copy


def vocab_parallel_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    tp_group: ProcessGroup | None = None,
    sp_group: ProcessGroup | None = None,
    vocab_start_index: int | None = None,
    vocab_end_index: int | None = None,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
    chunk_size: int | None = None,
) -> Tensor:
    """Hidden [.., D], equal on all of `tp_group`; this rank's rows of the head, weight [V/N, D] and bias [V/N].

    -> `vocab_parallel_cross_entropy(F.linear(hidden, weight, bias), target, ...)`, see there. A collective, backward
    too: chunk_size, rows at a time, must be the same on all ranks. ValueError for shapes that do not fit.
    """
    if hidden.shape[:-1] != target.shape or weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        given = f"hidden {list(hidden.shape)}, weight {list(weight.shape)}, target {list(target.shape)}"
        raise ValueError(f"{given}: must be [.., D], [V/N, D] and [..]")
    if reduction not in ("none", "sum", "mean") or (chunk_size is not None and chunk_size < 1):
        raise ValueError(f"{reduction=}, {chunk_size=}: one of none, sum and mean; at least 1")
    bounds = bounds_of(len(weight), tp_group, vocab_start_index, vocab_end_index)
    dtype = torch.promote_types(hidden.dtype, weight.dtype)
    rows, aims, head = hidden.float().flatten(0, -2), target.flatten(), weight.float()
    ranks = 1
    if tp_group is not None:
        rows, ranks = copy(rows, group_of(tp_group)), tp_group.size()
    size = chunk_size or max(1, ceil(len(rows) / ceil(bounds[2] / ranks / hidden.shape[-1])))
    chunks = zip(torch.split(rows, size), torch.split(aims, size), strict=True)
    options = tp_group, bounds, ignore_index
    each = [again(chunk_loss, chunk, head, bias, dtype, aim, *options) for chunk, aim in chunks]
    return reduced(torch.cat(each).view(target.shape), target, ignore_index, reduction, sp_group)


def chunk_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    target: Tensor,
    tp_group: ProcessGroup | None,
    bounds: Bounds,
    ignore_index: int,
) -> Tensor:
    """Hidden [C, D] and weight [V/N, D], both fp32 and multiplied in `dtype`, or as autocast has it -> losses [C]."""
    logits = F.linear(hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    return each_loss(logits, target, tp_group, bounds, ignore_index)
