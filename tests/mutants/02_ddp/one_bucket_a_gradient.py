"""A gradient launches one bucket at most.

task: Ddp
says: launch all that can go
"""


class Ddp(Ddp):
    def on_gradient(self, p):
        if not self.syncing:
            return
        self.ready.add(p)
        if len(self.flights) < len(self.buckets) and self.ready.issuperset(self.buckets[len(self.flights)]):
            self.launch()
