"""The weights are kept as they were at the start.

task: GradientShards
says: the shards alone may stay
"""


class GradientShards(GradientShards):
    def __init__(self, model, group, limit):
        self.group = group
        self.start = {n: p.detach().clone() for n, p in model.named_parameters()}
        self.buckets = assign_buckets(list(model.parameters()), limit)
        self.shards = {}
        self.ready = set()
        self.launched = 0
        self.flight = None
        for bucket in self.buckets:
            for p in bucket:
                p.register_post_accumulate_grad_hook(self.on_gradient)
