"""The hooks launch buckets in the first step alone; from then on finish() sends all.

task: Ddp
says: in the second step
"""

from contextlib import contextmanager

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


class Ddp:
    def __init__(self, model, group, limit):
        self.group = group
        for tensor in [*model.parameters(), *model.buffers()]:
            group.broadcast(tensor.data)
        self.buckets = assign_buckets(list(model.parameters()), limit)
        self.syncing = True
        self.ready = set()
        self.flights = []
        for p in model.parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(self.on_gradient)

    def on_gradient(self, p):
        if not self.syncing or getattr(self, "done", False):
            return
        self.ready.add(p)
        while len(self.flights) < len(self.buckets) and self.ready.issuperset(self.buckets[len(self.flights)]):
            self.launch()

    def launch(self):
        bucket = self.buckets[len(self.flights)]
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in bucket])
        self.flights.append((self.group.all_reduce(flat, "mean", async_op=True), flat))

    @contextmanager
    def no_sync(self):
        self.syncing = False
        try:
            yield
        finally:
            self.syncing = True

    def finish(self):
        while len(self.flights) < len(self.buckets):
            self.launch()
        for bucket, (work, flat) in zip(self.buckets, self.flights, strict=True):
            work.wait()
            for p, piece in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                p.grad = piece.view_as(p)
        self.ready.clear()
        self.flights.clear()
        self.done = True
