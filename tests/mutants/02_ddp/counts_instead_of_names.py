"""Buckets are launched by how many gradients are there, not which.

task: Ddp
says: its bucket left before it was there
"""


class Ddp(Ddp):
    def on_gradient(self, p):
        if not self.syncing:
            return
        self.ready.add(p)
        while len(self.flights) < len(self.buckets) and len(self.ready) >= sum(
            map(len, self.buckets[: len(self.flights) + 1])
        ):
            self.launch()
