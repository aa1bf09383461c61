"""What is under way is kept in one list for all models.

task: Ddp
says: is what is under way kept in the class, not in self
"""

_FLIGHTS = []


class Ddp(Ddp):
    def __init__(self, model, group, limit):
        self.group, self.flights = group, _FLIGHTS
        for tensor in [*model.parameters(), *model.buffers()]:
            group.broadcast(tensor.data)
        self.buckets = assign_buckets(list(model.parameters()), limit)
        self.syncing = True
        self.ready = set()
        for p in model.parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(self.on_gradient)
