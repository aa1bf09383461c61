"""Of two named classes, one derived from the other, both constructors shard the module.

task: sharded_init
says: a module is sharded twice
"""

from contextlib import contextmanager


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
