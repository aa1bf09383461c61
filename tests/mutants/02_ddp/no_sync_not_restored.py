"""An exception inside no_sync leaves the flag as it is.

task: Ddp
says: reset the flag in `finally`
"""

from contextlib import contextmanager


class Ddp(Ddp):
    @contextmanager
    def no_sync(self):
        self.syncing = False
        yield
        self.syncing = True
