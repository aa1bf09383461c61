"""An all-reduce, of which each rank then takes its part.

task: GradientShards
says: uses all_reduce, expected only reduce_scatter
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
        mine = torch.empty_like(flat[:shard])
        work = self.group.all_reduce(flat, "mean")
        mine.copy_(flat.view(ranks, -1)[self.group.rank])
        self.flight = (work, flat, mine)
        self.launched += 1
