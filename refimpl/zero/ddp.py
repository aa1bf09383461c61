"""Data parallel: every rank keeps everything, and gradients are averaged while backward runs.

Memory per rank, bytes per parameter with AdamW: fp32 4 params + 4 grads + 8 optimizer;
bf16 2 params + 2 grads + 12 optimizer (4 of them fp32 master weights).
Traffic per step: 2 Psi (N-1)/N, one all-reduce of the gradients, however many micro-batches.
Li et al. 2020, arXiv:2006.15704. DeepSpeed: deepspeed/runtime/engine.py, `allreduce_gradients` (stage 0).

A gradient's way: backward -> `Gradients.arrive` -> bucket full -> `reduce` -> `Update.apply`.
"""

from torch import Tensor

from refimpl.zero.flat import Bucket
from refimpl.zero.reduction.flights import Reduction
from refimpl.zero.stage import Stage


class DDP(Stage):
    def owned(self, bucket: Bucket) -> Tensor:
        """All of it: every rank updates every parameter. -> [P]"""
        return bucket.full

    def reduce(self, bucket: Bucket, local: Tensor) -> Reduction:
        """Runs inside backward, the moment a bucket is full. local [P] -> mean over ranks [P], in place."""
        work = bucket.group.all_reduce(local, self.gradients.op, async_op=True, tag="gradients")
        return Reduction(work, local, memory=local)
