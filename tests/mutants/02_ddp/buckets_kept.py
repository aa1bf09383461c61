"""The flat buffers of the last step are kept beside the gradients.

task: Ddp
says: is a buffer or a copy kept
"""


class Ddp(Ddp):
    def finish(self):
        while len(self.flights) < len(self.buckets):
            self.launch()
        for bucket, (work, flat) in zip(self.buckets, self.flights, strict=True):
            work.wait()
            for p, piece in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                p.grad = piece.view_as(p).clone()
        self.last = [flat for _, flat in self.flights]
        self.ready.clear()
        self.flights.clear()
