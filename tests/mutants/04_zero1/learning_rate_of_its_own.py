"""Adam's usual rate in place of the one that was asked for.

task: ShardedOptimizer
says: self.optimizer has lr
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
        self.optimizer = make_optimizer([self.mine])
        for group in self.optimizer.param_groups:
            group["lr"] = 0.001
