"""What arrives is added to the shard before its work was waited for.

task: GradientShards
says: holds NaN: it was read, or added to, before its work.wait()
"""


class GradientShards(GradientShards):
    def settle(self):
        if self.flight is None:
            return
        work, _, mine = self.flight
        number = self.launched - 1
        self.shards[number] = self.shards[number] + mine if number in self.shards else mine
        work.wait()
        self.flight = None
