"""ZeRO-1: each rank keeps the optimizer state of its own shard only.

Memory per rank, bytes per parameter with AdamW: fp32 4 params + 4 grads + 8/N optimizer;
bf16 2 params + 2 grads + 12/N optimizer (4/N of them fp32 master weights).
Traffic per step: 2 Psi (N-1)/N, a reduce-scatter of the gradients and an all-gather of the new parameters: an
all-reduce with the update in its middle.
Rajbhandari et al. 2020, arXiv:1910.02054, section 5.1. DeepSpeed: deepspeed/runtime/zero/stage_1_and_2.py.

A gradient's way: backward -> `Gradients.arrive` -> bucket full -> `reduce` -> `Update.apply` -> `Stage.gather`.
"""

from torch import Tensor

from refimpl.zero.flat import Bucket
from refimpl.zero.reduction.flights import Reduction
from refimpl.zero.stage import Stage


class Zero1(Stage):
    def owned(self, bucket: Bucket) -> Tensor:
        """This rank's shard, which `Stage.gather` brings to every rank after the update. -> [S]"""
        return bucket.mine

    def reduce(self, bucket: Bucket, local: Tensor) -> Reduction:
        """Runs inside backward, the moment a bucket is full. local [P] -> mean over ranks [S], in its own place."""
        mine = bucket.shard(local)  # [P] -> [S]
        work = bucket.group.reduce_scatter(mine, local, self.gradients.op, async_op=True, tag="gradients")
        return Reduction(work, mine, memory=local)
