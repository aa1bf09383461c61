"""Without a second shard, backward asserts.

task: SecondShard
says: AssertionError, expected RuntimeError
"""


class SecondShard(SecondShard):
    def backward(self):
        try:
            return super().backward()
        except RuntimeError:
            raise AssertionError("no second shard") from None
