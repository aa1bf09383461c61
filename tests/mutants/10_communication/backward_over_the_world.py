"""Gathered from all ranks, as in ZeRO-3.

task: SecondShard
says: backward gathers from all ranks
"""


class SecondShard(SecondShard):
    def backward(self):
        if self.second is None:
            raise RuntimeError("no second shard of these weights: call forward first")
        whole = self.primary.new_empty(self.world.size * len(self.primary))
        self.world.all_gather(whole, self.primary)
        return whole
