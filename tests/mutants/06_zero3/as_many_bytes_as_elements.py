"""The buffer gets as many bytes as it has elements.

task: ShardedParams
says: resize_ counts bytes
"""


class ShardedParams(ShardedParams):
    def gather(self):
        storage = self.full.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(self.full.numel())
            self.group.all_gather(self.full, self.mine)
