"""A bucket leaves when its first gradient is there.

task: GradientShards
says: before the gradient of
"""


class GradientShards(GradientShards):
    def on_gradient(self, p):
        self.ready.add(p)
        while self.launched < len(self.buckets) and self.ready.intersection(self.buckets[self.launched]):
            self.launch()
