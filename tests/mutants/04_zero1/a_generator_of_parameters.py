"""make_optimizer is given a generator.

task: ShardedOptimizer
says: is given a generator, expected a list
"""

from torch import nn


class ShardedOptimizer(ShardedOptimizer):
    def __init__(self, model, group, make_optimizer):
        self.group = group
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.flat = flatten(model, group.size)
        for tensor in [self.flat, *(p.data for p in model.parameters() if not p.requires_grad)]:
            group.broadcast(tensor)
        self.mine = nn.Parameter(self.flat.view(group.size, -1)[group.rank])
        self.optimizer = make_optimizer(p for p in [self.mine])
