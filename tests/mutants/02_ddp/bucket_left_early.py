"""A bucket leaves when its first gradient is there.

task: Ddp
says: before the gradient of
"""


class Ddp(Ddp):
    def on_gradient(self, p):
        if not self.syncing:
            return
        self.ready.add(p)
        while len(self.flights) < len(self.buckets) and self.ready.intersection(self.buckets[len(self.flights)]):
            self.launch()
