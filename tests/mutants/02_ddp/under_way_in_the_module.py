"""What is under way is a list of the module, which the first finish() empties for all models.

task: Ddp
says: finish() of one model waits for another's buckets
"""

FLIGHTS = []


class Ddp(Ddp):
    def __init__(self, model, group, limit):
        super().__init__(model, group, limit)
        FLIGHTS.clear()

    def launch(self):
        super().launch()
        number = len(self.flights) - 1
        FLIGHTS.append((self.buckets[number], *self.flights[-1]))

    def finish(self):
        while len(self.flights) < len(self.buckets):
            self.launch()
        for bucket, work, flat in FLIGHTS:
            work.wait()
            for p, piece in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                p.grad = piece.view_as(p).clone()
        FLIGHTS.clear()
        self.ready.clear()
        self.flights.clear()
