"""Leaves a mark on the classes.

task: sharded_init
says: the classes have new attributes
"""

from contextlib import contextmanager


@contextmanager
def sharded_init(group, *classes):
    units = []
    originals = {cls: cls.__init__ for cls in classes}

    def sharding(original):

        def init(module, *args, **kwargs):
            original(module, *args, **kwargs)
            units.append(ShardedParams(list(module.parameters()), group))

        return init

    try:
        for cls, original in originals.items():
            cls.__init__ = sharding(original)
        yield units
    finally:
        for cls, original in originals.items():
            cls.__init__ = original
            cls.sharded = True
