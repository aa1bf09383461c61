"""The next bucket is filled while the one before is still under way: two buffers at once.

task: GradientShards
says: is in its buffer before the one before has gone
"""

import torch


def assign_buckets(params, limit):
    buckets, room = [], 0
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
        self.where = {p: i for i, b in enumerate(self.buckets) for p in b}
        self.missing = [len(b) for b in self.buckets]
        self.next, self.way, self.shards = 0, None, {}
        for p in self.where:
            p.register_post_accumulate_grad_hook(self.on_gradient)

    def on_gradient(self, p):
        self.missing[self.where[p]] -= 1
        while self.next < len(self.buckets) and self.missing[self.next] <= 0:
            self.launch()

    def launch(self):
        bucket = self.buckets[self.next]
        numel = sum(p.numel() for p in bucket)
        flat = torch.zeros(-(-numel // self.group.size) * self.group.size, dtype=bucket[0].dtype)
        at = 0
        for p in bucket:
            if p.grad is not None:
                flat[at : at + p.numel()].view(p.shape).copy_(p.grad)
                p.grad = None
            at += p.numel()
        self.settle()
        out = flat.new_empty(len(flat) // self.group.size)
        self.way = (self.next, self.group.reduce_scatter(out, flat, "mean", async_op=True), out, flat)
        self.next += 1

    def settle(self):
        if self.way is None:
            return
        number, work, out, _flat = self.way
        work.wait()
        self.way = None
        if number in self.shards:
            self.shards[number] += out
        else:
            self.shards[number] = out

    def finish(self):
        while self.next < len(self.buckets):
            self.launch()
        self.settle()
        self.next = 0
        self.missing = [len(b) for b in self.buckets]
