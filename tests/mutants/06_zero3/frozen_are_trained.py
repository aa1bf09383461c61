"""Makes all parameters of a unit require a gradient.

task: ShardedParams
says: what is frozen stays frozen
"""


class ShardedParams(ShardedParams):
    def __init__(self, params, group):
        super().__init__(params, group)
        for p in self.params:
            p.requires_grad_(True)
