"""bf16 gradients travel in fp32, and come back as bf16.

task: Ddp
says: each all_reduce carries 2x the bytes
"""

import torch


class Ddp(Ddp):
    def launch(self):
        bucket = self.buckets[len(self.flights)]
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1).float() for p in bucket])
        self.flights.append((self.group.all_reduce(flat, "mean", async_op=True), flat))

    def finish(self):
        while len(self.flights) < len(self.buckets):
            self.launch()
        for bucket, (work, flat) in zip(self.buckets, self.flights, strict=True):
            work.wait()
            for p, piece in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                p.grad = piece.view_as(p).to(p.dtype)
        self.ready.clear()
        self.flights.clear()
