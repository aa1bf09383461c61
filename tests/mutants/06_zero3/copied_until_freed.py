"""Keeps a copy of the unit as long as it is whole.

task: ShardedParams
says: between gather() and free() the unit keeps
"""


class ShardedParams(ShardedParams):
    def gather(self):
        super().gather()
        self.before = self.full.clone()

    def free(self):
        self.before = None
        super().free()
