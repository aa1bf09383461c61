"""no_sync is there, but changes nothing.

task: Ddp
says: no_sync sends: nothing may travel inside it
"""


class Ddp(Ddp):
    def on_gradient(self, p):
        self.ready.add(p)
        while len(self.flights) < len(self.buckets) and self.ready.issuperset(self.buckets[len(self.flights)]):
            self.launch()
