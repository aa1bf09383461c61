"""Builds the whole model, and shards it then.

task: sharded_init
says: layers stay whole while the next are built
"""

from contextlib import contextmanager
from typing import Any


@contextmanager
def sharded_init(group, *classes):
    units, made = [], []
    originals = {cls: cls.__init__ for cls in classes}

    def sharding(original):

        def init(module, *args, **kwargs: Any):
            original(module, *args, **kwargs)
            made.append(module)

        return init

    try:
        for cls, original in originals.items():
            cls.__init__ = sharding(original)
        yield units
        units += [ShardedParams(list(m.parameters()), group) for m in made]
    finally:
        for cls, original in originals.items():
            cls.__init__ = original
