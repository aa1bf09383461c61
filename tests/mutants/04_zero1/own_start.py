"""Every rank keeps the weights it was made with.

task: ShardedOptimizer
says: it is still this rank's own: broadcast rank 0's
"""

from torch import nn


class ShardedOptimizer(ShardedOptimizer):
    def __init__(self, model, group, make_optimizer):
        self.group = group
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.flat = flatten(model, group.size)
        self.mine = nn.Parameter(self.flat.view(group.size, -1)[group.rank])
        self.optimizer = make_optimizer([self.mine])
