"""An interrupt leaves no_sync on.

task: Ddp
says: reset the flag in `finally`
"""

from contextlib import contextmanager


class Ddp(Ddp):
    @contextmanager
    def no_sync(self):
        self.syncing = False
        try:
            yield
        except Exception:
            self.syncing = True
            raise
        self.syncing = True
