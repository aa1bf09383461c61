"""Data parallel: every rank keeps everything, and gradients are averaged while backward runs.

Memory per rank, bytes per parameter with AdamW: fp32 4 params + 4 grads + 8 optimizer;
bf16 2 params + 2 grads + 12 optimizer (4 of them fp32 master weights).
Traffic per step: 2 Psi (N-1)/N, one all-reduce of the gradients, however many micro-batches.
Li et al. 2020, arXiv:2006.15704. DeepSpeed: deepspeed/runtime/engine.py, `allreduce_gradients` (stage 0).

A gradient's way: backward -> `Gradients.arrive` -> bucket full -> `reduce` -> `Update.apply`.
"""

from torch import Tensor, nn, optim

from refimpl.comm.group import Group, Work
from refimpl.optim.loss_scale import LossScaler
from refimpl.zero.config import ZeroConfig
from refimpl.zero.flat import Bucket, lay_out, trained
from refimpl.zero.gradients import Gradients
from refimpl.zero.stage import Stage, share_start
from refimpl.zero.update import Update


class DDP(Stage):
    def __init__(
        self,
        model: nn.Module,
        optimizer: optim.Optimizer,
        group: Group,
        config: ZeroConfig | None = None,
        scaler: LossScaler | None = None,
    ) -> None:
        super().__init__(model, group, config or ZeroConfig())
        self.buckets = lay_out(model, trained(optimizer, model), group, self.config.reduce_bucket_size)
        share_start(model, self.buckets, group)
        self.gradients = Gradients(self.buckets, self.reduce, group, self.config, self.names)
        owned = {b: b.full for b in self.buckets}  # [P]
        self.update = Update(optimizer, owned, group, self.config, scaler, replicated=True)
        self.before = Work()  # the all-reduce started last

    def reduce(self, bucket: Bucket, local: Tensor) -> tuple[Work, Tensor]:
        """Runs inside backward, the moment a bucket is full. local [P] -> mean over ranks [P], in place."""
        self.before.advance()  # into its second half, the gather, which now travels beside this bucket
        self.before = self.group.all_reduce(local, self.gradients.op, async_op=True, tag="gradients")
        return self.before, local

    def gather(self) -> None:
        """Nothing to gather: every rank has updated every parameter."""

    def step(self) -> bool:
        """Update all of the model on every rank."""
        done = self.update.apply(self.gradients.finish())
        self.gradients.clear()
        return done
