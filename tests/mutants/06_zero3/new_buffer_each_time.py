"""A fresh buffer for each gather; autograd's views still see the old one.

task: ShardedParams
says: self.full is another tensor now: autograd has kept views of the first one
"""

import torch


class ShardedParams:
    def __init__(self, params, group):
        self.params, self.group = (list(params), group)
        shard = -(-sum(p.numel() for p in self.params) // group.size)
        self.full, at = (torch.zeros(shard * group.size, dtype=self.params[0].dtype), 0)
        for p in self.params:
            piece = self.full[at : at + p.numel()].view(p.shape)
            piece.copy_(p.detach())
            p.data = piece
            at += p.numel()
        group.broadcast(self.full)
        self.mine = self.full.view(group.size, shard)[group.rank].clone()
        self.free()

    def gather(self):
        storage = self.full.untyped_storage()
        if storage.nbytes() == 0:
            self.full, at = (torch.empty(self.full.numel()), 0)
            self.group.all_gather(self.full, self.mine)
            for p in self.params:
                p.data = self.full[at : at + p.numel()].view(p.shape)
                at += p.numel()

    def free(self):
        self.full.untyped_storage().resize_(0)
