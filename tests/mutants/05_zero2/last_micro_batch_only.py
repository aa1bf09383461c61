"""Each micro-batch overwrites the shards of the one before.

task: GradientShards
says: only the last micro-batch is there
"""


class GradientShards(GradientShards):
    def settle(self):
        if self.flight is None:
            return
        work, _, mine = self.flight
        work.wait()
        number = self.launched - 1
        self.shards[number] = mine
        self.flight = None
