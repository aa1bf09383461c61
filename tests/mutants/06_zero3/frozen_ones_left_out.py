"""Shards what is trained, and frozen parameters stay whole on every rank.

task: sharded_init
says: stay whole: shard all that is inside
"""

from contextlib import contextmanager


@contextmanager
def sharded_init(group, *classes):
    units, originals = [], {cls: (cls.__init__, "__init__" in vars(cls)) for cls in classes}

    def sharding(cls, original):
        def init(module, *args, **kwargs):
            original(module, *args, **kwargs)
            if cls is next(c for c in type(module).__mro__ if c in classes):
                units.append(ShardedParams([p for p in module.parameters() if p.requires_grad], group))

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
