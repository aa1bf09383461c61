"""The new weights are written into the caller's old shard.

task: SecondShard
says: the old is the caller's
"""


class SecondShard:
    def __init__(self, primary, world, near):
        self.primary, self.world, self.near, self.second = (primary, world, near, None)

    def forward(self):
        full = self.primary.new_empty(self.primary.numel() * self.world.size)
        self.world.all_gather(full, self.primary)
        self.second = full.chunk(self.near.size)[self.near.rank].clone()
        return full

    def backward(self):
        if self.second is None:
            raise RuntimeError("no second shard: call forward first")
        full = self.second.new_empty(self.second.numel() * self.near.size)
        self.near.all_gather(full, self.second)
        return full

    def step(self, primary):
        self.primary.copy_(primary)
        self.second = None
