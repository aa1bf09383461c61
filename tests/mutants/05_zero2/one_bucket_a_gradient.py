"""A gradient launches one bucket at most.

task: GradientShards
says: launch all that can go (`while`, not `if`)
"""


class GradientShards(GradientShards):
    def on_gradient(self, p):
        self.ready.add(p)
        if self.launched < len(self.buckets) and self.ready.issuperset(self.buckets[self.launched]):
            self.launch()
