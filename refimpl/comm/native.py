"""The library's own collectives, for NCCL, which has fast ones: one launch each.

torch 2.13 renames the single-buffer collectives and warns about the old names, which 2.11 has alone.
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor

from refimpl.comm.collectives import NATIVE, Op
from refimpl.comm.transport import Library
from refimpl.comm.work import Steps


class Native(Library):
    """NCCL's transport. Which order a sum has is the library's choice."""

    gathers_lists = False  # it would gather into a buffer of its own, and copy

    def all_reduce(self, x: Tensor, op: Op) -> Steps:
        yield lambda: self.start(dist.all_reduce, x, self._op(op))

    def reduce_scatter(self, out: Tensor, x: Tensor, op: Op) -> Steps:
        yield lambda: self.start(_current("reduce_scatter"), out, x, self._op(op))

    def all_gather(self, chunks: list[Tensor], x: Tensor) -> Steps:
        if (whole := _in_one_piece(chunks)) is not None:
            yield lambda: self.start(_current("all_gather"), whole, x)
        else:
            yield lambda: self.start(dist.all_gather, chunks, x)

    def _op(self, op: Op) -> Any:
        """The mean of one rank's is its sum, which every version of NCCL gets right."""
        return NATIVE["sum" if op == "mean" and self.size == 1 else op]


def _in_one_piece(chunks: list[Tensor]) -> Tensor | None:
    """The tensor [N*s] that chunks [s] lie in one after the other, if they do."""
    first, step = chunks[0], chunks[0].numel() * chunks[0].element_size()
    storage = first.untyped_storage()
    same = all(c.untyped_storage().data_ptr() == storage.data_ptr() for c in chunks)
    if not same or any(c.data_ptr() != first.data_ptr() + i * step for i, c in enumerate(chunks)):
        return None
    return first.as_strided((first.numel() * len(chunks),), (1,))


def _current(name: str) -> Any:
    old = {"reduce_scatter": "reduce_scatter_tensor", "all_gather": "all_gather_into_tensor"}[name]
    return getattr(dist, f"{name}_single", None) or getattr(dist, old)
