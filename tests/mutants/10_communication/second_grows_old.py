"""The second shard outlives the step.

task: SecondShard
says: the second shard has the old weights
"""


class SecondShard(SecondShard):
    def step(self, primary):
        self.primary = primary
