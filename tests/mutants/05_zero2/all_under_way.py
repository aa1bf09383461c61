"""All buckets are started, and waited for at the end.

task: GradientShards
says: buckets are under way at once
"""

import torch


class GradientShards(GradientShards):
    def __init__(self, model, group, limit):
        self.group = group
        self.buckets = assign_buckets(list(model.parameters()), limit)
        self.shards = {}
        self.ready = set()
        self.launched = 0
        self.flight = []
        for bucket in self.buckets:
            for p in bucket:
                p.register_post_accumulate_grad_hook(self.on_gradient)

    def launch(self):
        bucket, ranks = (self.buckets[self.launched], self.group.size)
        shard = -(-sum(p.numel() for p in bucket) // ranks)
        flat, at = (torch.zeros(shard * ranks, dtype=bucket[0].dtype), 0)
        for p in bucket:
            if p.grad is not None:
                flat[at : at + p.numel()].view(p.shape).copy_(p.grad)
            p.grad = None
            at += p.numel()
        mine = torch.empty_like(flat[:shard])
        self.flight.append((self.group.reduce_scatter(mine, flat, "mean", async_op=True), flat, mine))
        self.launched += 1

    def settle(self):
        for number, (work, _, mine) in enumerate(self.flight):
            work.wait()
            self.shards[number] = self.shards[number] + mine if number in self.shards else mine
        self.flight.clear()
