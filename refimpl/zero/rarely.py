"""A stage's weights for `LocalSGD` and `DiLoCo`: near ranks average gradients at every step, far ranks meet rarely.

    near, far = neighbours(Group.world(), ranks_per_node)        # refimpl.comm.axes
    stage = Zero2(model, optimizer, near)
    outer = DiLoCo(shards_of(stage), every=100, group=far)

A rank meets those that have its place in the other nodes, with its shard alone: of n bytes of fp32 weights on R ranks a
node, each sends 2 n/R (F-1)/F to the F nodes' ranks every H steps: 2 n (F-1)/F leave a node in all. DDP's ranks take
a share each, too, and gather it near by: n (R-1)/R. DiLoCo's theta and momentum are divided by R.
"""

import torch
from torch import Tensor

from refimpl.comm.group import Group
from refimpl.optim.weights import Weights
from refimpl.zero.flat import Bucket
from refimpl.zero.stage import Stage


def shards_of(stage: Stage) -> Weights:
    """What this rank of a stage with an optimizer updates, fp32 masters in low precision. RuntimeError without one."""
    stage.refuse_without_optimizer()
    return Shards(stage)


class Shards(Weights):
    """One flat tensor a bucket: [S], this rank's."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.buckets: list[Bucket] = []
        self.refresh()

    def refresh(self) -> None:
        self.stage.include_thawed()
        self.buckets = list(self.stage.buckets)
        named = (" ".join(self.stage.names[p] for p in bucket.params) for bucket in self.buckets)
        self.names = [f"{bucket.name} ({names})" for bucket, names in zip(self.buckets, named, strict=True)]

    def read(self) -> list[Tensor]:
        self.stage.catch_up()
        self.stage.free_gathered()  # for an evaluation, with the old weights
        return [mine(bucket, self.stage.weights(bucket)).detach() for bucket in self.buckets]

    @torch.no_grad()
    def write(self, values: list[Tensor]) -> None:
        for bucket, value in zip(self.buckets, values, strict=True):
            flat = self.stage.weights(bucket)
            share = mine(bucket, flat)
            share.copy_(value)
            if flat is not share:  # every rank near by has all of it
                bucket.group.all_gather(flat, share, tag="weights near")
            self.stage.put_weights(bucket, flat)
        self.stage.gather()

    def frozen(self, values: list[Tensor]) -> list[Tensor]:
        pairs = zip(self.buckets, values, strict=True)
        return [value[slice(*bucket.span(p))] for bucket, value in pairs for p in bucket.params if not p.requires_grad]

    def start(self, group: Group) -> None:
        self.stage.take_weights(group, "start")

    def buffers(self) -> list[Tensor]:
        return list(self.stage.model.buffers())


def mine(bucket: Bucket, flat: Tensor) -> Tensor:
    """This rank's share of flat, [P] or [S]. -> [S]"""
    return bucket.shard(flat) if flat.numel() == bucket.padded != bucket.shard_numel else flat
