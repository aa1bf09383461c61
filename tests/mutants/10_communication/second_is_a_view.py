"""The second shard keeps the whole layer alive.

task: SecondShard
says: keep a copy of your part
"""


class SecondShard(SecondShard):
    def forward(self):
        whole = self.primary.new_empty(self.world.size * len(self.primary))
        self.world.all_gather(whole, self.primary)
        self.second = whole.chunk(self.near.size)[self.near.rank]
        return whole
