"""Any bucket that fills launches the next in line, whose gradients may not be there yet.

task: GradientShards
says: bucket 0 is launched before the gradient of 1.
"""


class GradientShards(GradientShards):
    def on_gradient(self, p):
        self.ready.add(p)
        (mine,) = (bucket for bucket in self.buckets if any(p is other for other in bucket))
        if self.ready.issuperset(mine):
            self.launch()
