"""Buckets are launched as they fill, so that ranks which leave parameters unused call other collectives.

task: Ddp
says: ranks called different collectives
says: rank 0                    rank 1
"""

import torch


class Ddp(Ddp):
    def on_gradient(self, p):
        if not self.syncing:
            return
        self.ready.add(p)
        bucket = next(b for b in self.buckets if any(q is p for q in b))
        if self.ready.issuperset(bucket):
            self.launch(bucket)

    def launch(self, bucket):
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in bucket])
        self.flights.append((bucket, self.group.all_reduce(flat, "mean", async_op=True), flat))

    def finish(self):
        for bucket in self.buckets:
            if not any(bucket is launched for launched, _, _ in self.flights):
                self.launch(bucket)
        for bucket, work, flat in self.flights:
            work.wait()
            for p, piece in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                p.grad = piece.view_as(p)
        self.ready.clear()
        self.flights.clear()
