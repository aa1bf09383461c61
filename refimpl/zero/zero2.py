"""ZeRO-2: each rank keeps the gradients of its own shard only.

Memory per rank, bytes per parameter with AdamW: fp32 4 params + 4/N grads + 8/N optimizer;
bf16 2 params + 2/N grads + 12/N optimizer (4/N of them fp32 master weights).
Traffic per step: 2 Psi (N-1)/N, as ZeRO-1; with A micro-batches (A + 1) Psi (N-1)/N, because each one's gradients
must leave before the next one's arrive. Three buckets of reduce_bucket_size come on top: two travel, one fills.
Rajbhandari et al. 2020, arXiv:1910.02054, section 5.2. DeepSpeed: deepspeed/runtime/zero/stage_1_and_2.py.

A gradient's way: backward -> `Gradients.arrive` -> bucket full -> `reduce` -> `Update.apply` -> `Stage.gather`.
"""

from torch import Tensor

from refimpl.zero.flat import Bucket
from refimpl.zero.reduction.flights import Reduction
from refimpl.zero.stage import Stage


class Zero2(Stage):
    reduces_always = True  # there is no memory in which a whole gradient could wait

    def owned(self, bucket: Bucket) -> Tensor:
        """This rank's shard, which `Stage.gather` brings to every rank after the update. -> [S]"""
        return bucket.mine

    def reduce(self, bucket: Bucket, local: Tensor) -> Reduction:
        """Runs inside backward, the moment a bucket is full. local [P] -> mean over ranks [S]; local is then free."""
        mine = self.gradients.results.take(bucket.shard_numel, local)  # [S]
        work = bucket.group.reduce_scatter(mine, local, self.gradients.op, async_op=True, tag="gradients")
        return Reduction(work, mine, memory=mine)
