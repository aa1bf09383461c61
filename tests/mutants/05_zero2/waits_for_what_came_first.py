"""Which parameters are used is learnt from the first micro-batch, and may change.

task: GradientShards
says: before the gradient of spare
"""


class GradientShards(GradientShards):
    def __init__(self, model, group, limit):
        self.group = group
        self.buckets = assign_buckets(list(model.parameters()), limit)
        self.shards = {}
        self.ready = set()
        self.launched = 0
        self.unused = set()
        self.flight = None
        for bucket in self.buckets:
            for p in bucket:
                p.register_post_accumulate_grad_hook(self.on_gradient)

    def on_gradient(self, p):
        self.ready.add(p)
        while self.launched < len(self.buckets) and (self.ready | self.unused).issuperset(self.buckets[self.launched]):
            self.launch()

    def finish(self):
        while self.launched < len(self.buckets):
            self.launch()
        self.settle()
        self.unused = self.unused or {p for bucket in self.buckets for p in bucket} - self.ready
        self.ready.clear()
        self.launched = 0
