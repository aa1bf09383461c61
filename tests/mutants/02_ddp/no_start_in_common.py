"""Ranks keep the weights that they began with.

task: Ddp
says: broadcast it from rank 0
"""


class Ddp(Ddp):
    def __init__(self, model, group, limit):
        self.group = group
        self.buckets = assign_buckets(list(model.parameters()), limit)
        self.syncing = True
        self.ready = set()  # whose gradient of this backward is complete
        self.flights = []  # launched, in the order of the buckets
        for p in model.parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(self.on_gradient)
