"""A flag says that it is whole, and free() does not take it back.

task: ShardedParams
says: gather() after free() does nothing
"""


class ShardedParams(ShardedParams):
    def gather(self):
        if not getattr(self, "whole", False):
            self.whole = True
            super().gather()
