"""bf16 gradients travel in fp32, and their shards stay so.

task: GradientShards
says: has dtype torch.float32, and the gradients have torch.bfloat16
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
