"""Gradients are divided by the number of backwards, which add up.

task: Ddp
says: divided by the number of micro-batches
"""

from contextlib import contextmanager


class Ddp(Ddp):
    def __init__(self, model, group, limit):
        self.group = group
        for tensor in [*model.parameters(), *model.buffers()]:
            group.broadcast(tensor.data)
        self.buckets = assign_buckets(list(model.parameters()), limit)
        self.syncing = True
        self.parts = {}
        self.ready = set()
        self.flights = []
        for p in model.parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(self.on_gradient)

    def on_gradient(self, p):
        self.backwards = max(self.parts.get(q, 0) for q in [p]) + 1
        self.parts[p] = self.backwards
        if not self.syncing:
            return
        self.ready.add(p)
        while len(self.flights) < len(self.buckets) and self.ready.issuperset(self.buckets[len(self.flights)]):
            self.launch()

    @contextmanager
    def no_sync(self):
        self.syncing = False
        self.entered = True
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
        for bucket in self.buckets:
            for p in bucket:
                p.grad /= max(self.parts.values())
        self.parts.clear()
        self.ready.clear()
        self.flights.clear()
