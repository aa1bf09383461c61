"""Sequence parallelism with its all-gather behind a product: column layers multiply their own tokens meanwhile.

    gather_sum    all-gather [T/N -> T] . . . . . . . . , then X A
    overlapped    all-gather begins, X_rank A, all-gather ends, X_r A of the other ranks r

Rows of a product do not depend on each other, so tokens may be multiplied one rank's after the other's. Of a layer's
forward 1/N is thus computed while the bytes are under way: what is sent is the same. In backward the weight's gradient
is a sum of N products, a rank's tokens each, in place of one over all tokens: the same numbers added up in other order,
within 2 T eps sum |x dy| of each other, T the tokens of all sequences. The reduce-scatter of X's gradient is not
overlapped. Memory: as `gather_sum`, and the N products before they are joined.

Wang et al., ASPLOS 2023, cut such pairs for TPUs; Megatron-LM has it as `tp_comm_overlap`, torch as
`fused_all_gather_matmul` in torch/distributed/_symmetric_memory.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from refimpl.comm.group import Group
from refimpl.comm.work import Work
from refimpl.parallel.conjugates import TAG, conjugate

MARK = "own tokens multiplied"


class Coming:
    """All ranks' tokens, of which this rank's own are there and the others are on their way."""

    def __init__(self, x: Tensor, group: Group) -> None:
        """x [B, T/N, ..]."""
        self.x, self.group = x, group
        self.work: Work = Work()
        self.all: Tensor = Gathering.apply(x, self)  # type: ignore[no-untyped-call]  # [N, B, T/N, ..]

    def through(self, multiply: Callable[[Tensor], Tensor]) -> Tensor:
        """multiply, of one rank's tokens after the other's, its own first -> [B, T, ..]."""
        mine = multiply(self.x)
        self.group.ledger.mark(MARK)
        self.work.wait()
        ranks = range(self.group.size)
        return torch.cat([mine if rank == self.group.rank else multiply(self.all[rank]) for rank in ranks], 1)


def coming(x: Tensor, group: Group) -> Any:
    """`gather_sum` for a column layer, which multiplies what is there before it waits."""
    return x if group.size == 1 else Coming(x, group)


class Gathering(torch.autograd.Function):
    """An all-gather that is begun; it may be used when the work is done. Backward: a reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, to: Coming) -> Tensor:
        ctx.group = to.group
        every, to.work = _begun(to.group, x)
        return every

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return conjugate(grads[0], ctx.group, partial(_sum, ctx.group), partial(_every, ctx.group)), None


def _begun(group: Group, x: Tensor) -> tuple[Tensor, Work]:
    mine = x.contiguous()
    every = mine.new_empty(group.size, *mine.shape)
    return every, group.all_gather(every, mine, async_op=True, tag=TAG)


def _every(group: Group, x: Tensor) -> Tensor:
    every, work = _begun(group, x)
    work.wait()
    return every


def _sum(group: Group, every: Tensor) -> Tensor:
    mine = torch.empty_like(every[0], memory_format=torch.contiguous_format)
    group.reduce_scatter(mine, every.contiguous(), tag=TAG)
    return mine
