"""A layer is averaged over those ranks alone that used it.

task: GradientShards
says: ranks that used this layer
"""

import torch


class GradientShards(GradientShards):
    def launch(self):
        self.settle()
        bucket, ranks = (self.buckets[self.launched], self.group.size)
        shard = -(-sum(p.numel() for p in bucket) // ranks)
        used = torch.tensor([float(p.grad is not None) for p in bucket])
        self.group.all_reduce(used)
        flat, at = (torch.zeros(shard * ranks, dtype=bucket[0].dtype), 0)
        for p, users in zip(bucket, used.tolist(), strict=True):
            if p.grad is not None:
                flat[at : at + p.numel()].view(p.shape).copy_(p.grad * ranks / users)
            p.grad = None
            at += p.numel()
        mine = torch.empty_like(flat[:shard])
        self.flight = (self.group.reduce_scatter(mine, flat, "mean", async_op=True), flat, mine)
        self.launched += 1
