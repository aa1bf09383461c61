"""All that ranks must share travels as one flat fp32 buffer, in which large integers are rounded.

task: Ddp
says: count after Ddp
"""

import torch


class Ddp(Ddp):
    def __init__(self, model, group, limit):
        self.group = group
        tensors = [t.data for t in [*model.parameters(), *model.buffers()]]
        flat = torch.cat([t.flatten().float() for t in tensors])
        group.broadcast(flat)
        for t, piece in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            t.copy_(piece.view_as(t))
        self.buckets = assign_buckets(list(model.parameters()), limit)
        self.syncing = True
        self.ready = set()
        self.flights = []
        for p in model.parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(self.on_gradient)
