"""The conjugate pairs: what the ranks exchange in forward, and its transpose, which is what they exchange in backward.

    function         forward                    backward                  conjugate        sends, of n bytes, each way
    copy             nothing                    all-reduce                reduce           0,           2n(N-1)/N
    reduce           all-reduce                 nothing                   copy             2n(N-1)/N,   0
    scatter          keep my part               all-gather                gather           0,           n(N-1)/N
    gather           all-gather                 keep my part              scatter          n(N-1)/N,    0
    gather_sum       all-gather                 reduce-scatter            sum_scatter      n(N-1)/N,    n(N-1)/N
    sum_scatter      reduce-scatter             all-gather                gather_sum       n(N-1)/N,    n(N-1)/N

n is the whole tensor. `copy` and `reduce` are the f and g of Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053,
section 3): f stands where a whole tensor enters a split layer, g where partial sums leave it. `gather_sum` and
`sum_scatter` are the g and its conjugate of sequence parallelism (Korthikanti et al. 2022, arXiv:2205.05198, section
4.2.2), for tensors of which each rank holds some tokens: an all-reduce is one after the other.

Why those. The ranks' tensors together are one long vector, and each function is a linear map of it: `copy` repeats a
vector N times, so its transpose adds N vectors up. Gradients pass through a linear map by its transpose. Hence one
autograd function is enough, whose backward is itself with the two directions exchanged; it can be differentiated again.
The all-to-alls of experts and of Ulysses are such pairs too: there, and the way back.
The sums add the ranks' parts in rank order.

Which to use is not a matter of shapes: `gather` is for what each rank then uses in the same way (its gradient is whole
on every rank), `gather_sum` for what each rank uses in its own way (its gradient is a part of a sum). Megatron-LM:
megatron/core/tensor_parallel/mappings.py. DeepSpeed: deepspeed/module_inject/layers.py.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from refimpl.comm.group import Group
from refimpl.parallel.split import Split

Op = Callable[[Tensor], Tensor]
TAG = "tensor"


def copy(x: Tensor, group: Group) -> Tensor:
    """x, equal on all ranks -> x. Its gradient is summed over the ranks: Megatron's f."""
    return conjugate(x, group, _same, partial(_total, group))


def reduce(x: Tensor, group: Group) -> Tensor:
    """x, a part of a sum on each rank -> the sum, on all. Its gradient is the sum's: Megatron's g."""
    return conjugate(x, group, partial(_total, group), _same)


def scatter(x: Tensor, group: Group, dim: int = -1, split: Split | None = None) -> Tensor:
    """x, equal on all -> this rank's part along `dim`; of N equal ones by default; ValueError if there are none."""
    split = split or equal(x.shape[dim], group.size, dim)
    return conjugate(x, group, partial(_part, group, split, dim), partial(_whole, group, split, dim))


def gather(x: Tensor, group: Group, dim: int = -1, split: Split | None = None) -> Tensor:
    """This rank's part along `dim` -> the whole, on all ranks, for what all of them compute alike."""
    split = split or equal(x.shape[dim] * group.size, group.size, dim)
    return conjugate(x, group, partial(_whole, group, split, dim), partial(_part, group, split, dim))


def gather_sum(x: Tensor, group: Group, dim: int = 1) -> Tensor:
    """This rank's part of `dim`, the tokens -> all of them, for what each rank uses differently."""
    split = equal(x.shape[dim] * group.size, group.size, dim)
    return conjugate(x, group, partial(_whole, group, split, dim), partial(_sum_scatter, group, dim))


def sum_scatter(x: Tensor, group: Group, dim: int = 1) -> Tensor:
    """x, a part of a sum on each rank -> this rank's tokens (along `dim`) of the sum. ValueError if unequal."""
    split = equal(x.shape[dim], group.size, dim)
    return conjugate(x, group, partial(_sum_scatter, group, dim), partial(_whole, group, split, dim))


def conjugate(x: Tensor, group: Group, there: Op, back: Op) -> Tensor:
    """there(x), whose gradient goes `back`. A group of one exchanges nothing."""
    result: Tensor = x if group.size == 1 else Conjugate.apply(x, there, back)  # type: ignore[no-untyped-call]
    return result


class Conjugate(torch.autograd.Function):
    """`there` in forward, `back` in backward: each must be the other's transpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Op, back: Op) -> Tensor:
        ctx.there, ctx.back = there, back
        return there(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        pulled: Tensor = Conjugate.apply(grad, ctx.back, ctx.there)  # type: ignore[no-untyped-call]
        return pulled, None, None


def equal(length: int, ranks: int, dim: int) -> Split:
    """N equal parts. ValueError, with the numbers, if there are none."""
    if length % ranks:
        raise ValueError(
            f"dimension {dim} has {length}, which {ranks} ranks cannot share equally: "
            f"pad it to {-(-length // ranks) * ranks}, or give a split"
        )
    return Split((length,), length, ranks, f"dimension {dim}")


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


def _total(group: Group, x: Tensor) -> Tensor:
    # A copy: x may be somebody else's too, as a gradient that flows into both sides of an addition is.
    total = x.clone(memory_format=torch.contiguous_format)
    group.all_reduce(total, tag=TAG)
    return total


def _part(group: Group, split: Split, dim: int, x: Tensor) -> Tensor:
    return split.part(x, group.rank, dim)


def _whole(group: Group, split: Split, dim: int, x: Tensor) -> Tensor:
    return split.gather(x, group, dim, TAG)


def _sum_scatter(group: Group, dim: int, x: Tensor) -> Tensor:
    rows = torch.stack(x.chunk(group.size, dim))  # [N, .., s, ..]
    mine = torch.empty_like(rows[0])
    group.reduce_scatter(mine, rows, tag=TAG)
    return mine
