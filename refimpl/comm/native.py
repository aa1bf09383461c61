"""The library's own collectives, for NCCL, which has fast ones: one launch each.

torch 2.13 renames the single-buffer collectives and warns about the old names, which 2.11 has alone.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from refimpl.comm.collectives import NATIVE, Op, joined
from refimpl.comm.transport import KNOWN, Library, movable
from refimpl.comm.work import Steps


class Native(Library):
    """NCCL's transport. Which order a sum has is the library's choice."""

    gathers_lists = False  # it would gather into a buffer of its own, and copy

    def all_reduce(self, x: Tensor, op: Op) -> Steps:
        numbers = addable("all_reduce", x)
        return iter([lambda: self.begin(dist.all_reduce, numbers, self._op(op))])

    def reduce_scatter(self, out: Tensor, x: Tensor, op: Op) -> Steps:
        return self._reduce_scatter(addable("reduce_scatter", out), addable("reduce_scatter", x), op)

    def _reduce_scatter(self, out: Tensor, x: Tensor, op: Op) -> Steps:
        there = out if out.dtype == x.dtype else x.new_empty(out.numel())  # the library converts nothing
        yield lambda: self.begin(current("reduce_scatter"), there, x, self._op(op))
        if there is not out:
            out.copy_(there)

    def all_gather(self, chunks: list[Tensor], x: Tensor) -> Steps:
        if (whole := joined(chunks)) is not None:
            yield lambda: self.start(current("all_gather"), whole, x)
        else:
            yield lambda: self.start(dist.all_gather, [movable(chunk) for chunk in chunks], x)

    def _op(self, op: Op) -> Any:
        """The mean of one rank's is its sum, which every version of NCCL gets right."""
        return NATIVE["sum" if op == "mean" and self.size == 1 else op]


def addable(call: str, x: Tensor) -> Tensor:
    """x [n] as numbers that NCCL adds: a complex one is two. ValueError before anything is sent if it has no such."""
    if x.is_complex():
        return torch.view_as_real(x).view(-1)
    if not (x.dtype in KNOWN or x.is_floating_point()):
        raise ValueError(
            f"{call}: NCCL cannot add {x.dtype}: reduce x.int(), or ask for a Group with deterministic=True, which can"
        )
    return x


def current(name: str) -> Any:
    """torch's collective of one buffer, "reduce_scatter" or "all_gather", by the name that it has here."""
    old = {"reduce_scatter": "reduce_scatter_tensor", "all_gather": "all_gather_into_tensor"}[name]
    return getattr(dist, f"{name}_single", None) or getattr(dist, old)
