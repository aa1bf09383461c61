"""A class that had inherited its constructor has one of its own afterwards.

task: sharded_init
says: delete yours
"""

from contextlib import contextmanager


@contextmanager
def sharded_init(group, *classes):
    units = []
    originals = {cls: (cls.__init__, "__init__" in vars(cls)) for cls in classes}

    def sharding(cls, original):

        def init(module, *args, **kwargs):
            original(module, *args, **kwargs)
            if cls is next(c for c in type(module).__mro__ if c in classes):
                units.append(ShardedParams(list(module.parameters()), group))

        return init

    try:
        for cls, (original, _) in originals.items():
            cls.__init__ = sharding(cls, original)
        yield units
    finally:
        for cls, (original, _) in originals.items():
            cls.__init__ = original
