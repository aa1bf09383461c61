"""bf16 gradients travel in fp32, with twice the bytes; the shards are bf16 again.

task: GradientShards
says: each reduce_scatter carries 2x the bytes
"""

import torch


class GradientShards(GradientShards):
    def launch(self):
        self.settle()
        bucket, ranks = (self.buckets[self.launched], self.group.size)
        shard = -(-sum(p.numel() for p in bucket) // ranks)
        flat, at = (torch.zeros(shard * ranks), 0)
        for p in bucket:
            if p.grad is not None:
                flat[at : at + p.numel()].view(p.shape).copy_(p.grad)
            p.grad = None
            at += p.numel()
        mine = torch.empty_like(flat[:shard])
        self.flight = (self.group.reduce_scatter(mine, flat, "mean", async_op=True), flat, mine)
        self.launched += 1

    def settle(self):
        if self.flight is None:
            return
        work, _, mine = self.flight
        work.wait()
        mine = mine.to(self.buckets[0][0].dtype)
        number = self.launched - 1
        self.shards[number] = self.shards[number] + mine if number in self.shards else mine
        self.flight = None
