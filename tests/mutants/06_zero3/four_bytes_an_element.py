"""The buffer grows back by 4 bytes an element, which is twice of what bf16 takes.

task: ShardedParams
says: bytes are alive after gather()
"""


class ShardedParams(ShardedParams):
    def gather(self):
        storage = self.full.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(self.full.numel() * 4)
            self.group.all_gather(self.full, self.mine)
