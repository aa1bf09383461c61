"""Each rank updates the first shard.

task: ShardedOptimizer
says: rank 1's shard begins at element 0 of the buffer
"""


class ShardedOptimizer(ShardedOptimizer):
    def __init__(self, model, group, make_optimizer):
        super().__init__(model, group, make_optimizer)
        whole = flatten(model, group.size)
        group.broadcast(whole)
        self.flat = whole
        self.mine = nn.Parameter(whole[: len(whole) // group.size])
        self.optimizer = make_optimizer([self.mine])
