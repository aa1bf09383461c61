"""A closure in a loop: every class gets the last one's constructor.

task: sharded_init
says: sharded_init raised
"""

from contextlib import contextmanager
from typing import Any


@contextmanager
def sharded_init(group, *classes):
    units = []
    originals = {cls: cls.__init__ for cls in classes}

    def sharding(original):

        def init(module, *args, **kwargs: Any):
            cls = list(originals)[-1]
            originals[cls](module, *args, **kwargs)
            units.append(ShardedParams(list(module.parameters()), group))

        return init

    try:
        for cls, original in originals.items():
            cls.__init__ = sharding(original)
        yield units
    finally:
        for cls, original in originals.items():
            cls.__init__ = original
