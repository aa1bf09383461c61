"""Gradients are freed when their bucket has arrived, not when it leaves.

task: GradientShards
says: gradients were alive at once
"""

import torch


class GradientShards(GradientShards):
    def launch(self):
        self.settle()
        bucket, ranks = self.buckets[self.launched], self.group.size
        shard = -(-sum(p.numel() for p in bucket) // ranks)
        flat, at = torch.zeros(shard * ranks, dtype=bucket[0].dtype), 0
        for p in bucket:
            if p.grad is not None:
                flat[at : at + p.numel()].view(p.shape).copy_(p.grad)
            at += p.numel()
        mine = torch.empty_like(flat[:shard])
        self.flight = (self.group.reduce_scatter(mine, flat, "mean", async_op=True), flat, mine)
        self.launched += 1

    def settle(self):
        if self.flight is None:
            return
        work, _, mine = self.flight
        work.wait()
        for p in self.buckets[self.launched - 1]:
            p.grad = None
        number = self.launched - 1
        self.shards[number] = self.shards[number] + mine if number in self.shards else mine
        self.flight = None
