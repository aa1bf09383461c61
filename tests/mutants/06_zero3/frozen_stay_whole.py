"""What requires no gradient stays whole.

task: ShardedParams
says: bytes of parameters are alive after ShardedParams
"""

import torch


class ShardedParams(ShardedParams):
    def __init__(self, params, group):
        self.params, self.group = ([p for p in params if p.requires_grad], group)
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
