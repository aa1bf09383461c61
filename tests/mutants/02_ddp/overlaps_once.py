"""The hooks launch buckets in the first step alone; from then on finish() sends all.

task: Ddp
says: in the second step
"""


class Ddp(Ddp):
    def on_gradient(self, p):
        if not self.syncing or getattr(self, "done", False):
            return
        self.ready.add(p)
        while len(self.flights) < len(self.buckets) and self.ready.issuperset(self.buckets[len(self.flights)]):
            self.launch()

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
