"""Buffers that have travelled stay in a list.

task: GradientShards
says: are sent buckets, or a copy of the model, kept
"""


class GradientShards(GradientShards):
    def __init__(self, model, group, limit):
        self.group = group
        self.buckets = assign_buckets(list(model.parameters()), limit)
        self.shards = {}
        self.ready = set()
        self.launched = 0
        self.flight, self.done = None, []
        for bucket in self.buckets:
            for p in bucket:
                p.register_post_accumulate_grad_hook(self.on_gradient)

    def settle(self):
        if self.flight is None:
            return
        work, flat, mine = self.flight
        self.done.append(flat)
        work.wait()
        number = self.launched - 1
        self.shards[number] = self.shards[number] + mine if number in self.shards else mine
        self.flight = None
