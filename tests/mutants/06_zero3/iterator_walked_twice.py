"""The parameters are walked twice, and an iterator has only one walk.

task: ShardedParams
says: begin with list(params)
"""

import torch


class ShardedParams(ShardedParams):
    def __init__(self, params, group):
        self.params, self.group = (params, group)
        shard = -(-sum(p.numel() for p in self.params) // group.size)
        self.full, at = (torch.zeros(shard * group.size, dtype=next(iter(self.params)).dtype), 0)
        for p in self.params:
            piece = self.full[at : at + p.numel()].view(p.shape)
            piece.copy_(p.detach())
            p.data = piece
            at += p.numel()
        group.broadcast(self.full)
        self.mine = self.full.view(group.size, shard)[group.rank].clone()
        self.free()
