"""The classes stay changed when the constructor fails.

task: sharded_init
says: put them back in `finally`
"""

from contextlib import contextmanager
from typing import Any


@contextmanager
def sharded_init(group, *classes):
    units = []
    originals = {cls: cls.__init__ for cls in classes}

    def sharding(original):

        def init(module, *args, **kwargs: Any):
            original(module, *args, **kwargs)
            units.append(ShardedParams(list(module.parameters()), group))

        return init

    for cls, original in originals.items():
        cls.__init__ = sharding(original)
    yield units
    for cls, original in originals.items():
        cls.__init__ = original
