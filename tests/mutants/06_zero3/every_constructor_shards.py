"""Of two named classes, one derived from the other, both constructors shard the module.

task: sharded_init
says: a module is sharded twice
"""

from contextlib import contextmanager

import torch


class ShardedParams:
    def __init__(self, params, group):
        self.params, self.group = (list(params), group)
        shard = -(-sum(p.numel() for p in self.params) // group.size)
        self.full, at = (torch.zeros(shard * group.size, dtype=self.params[0].dtype), 0)
        for p in self.params:
            piece = self.full[at : at + p.numel()].view(p.shape)
            piece.copy_(p.detach())
            p.data = piece
            at += p.numel()
        group.broadcast(self.full)
        self.mine = self.full.view(group.size, shard)[group.rank].clone()
        self.free()

    def gather(self):
        storage = self.full.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(self.full.numel() * self.full.element_size())
            self.group.all_gather(self.full, self.mine)

    def free(self):
        self.full.untyped_storage().resize_(0)


@contextmanager
def sharded_init(group, *classes):
    units = []
    originals = {cls: (cls.__init__, "__init__" in vars(cls)) for cls in classes}

    def sharding(cls, original):

        def init(module, *args, **kwargs):
            original(module, *args, **kwargs)
            if cls:
                units.append(ShardedParams(list(module.parameters()), group))

        return init

    try:
        for cls, (original, _) in originals.items():
            cls.__init__ = sharding(cls, original)
        yield units
    finally:
        for cls, (original, is_own) in originals.items():
            if is_own:
                cls.__init__ = original
            else:
                del cls.__init__
