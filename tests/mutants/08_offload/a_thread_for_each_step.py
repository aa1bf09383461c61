"""Each step makes a pool with a thread of its own.

task: DelayedUpdate
says: the update begins in another thread than self.thread
"""

from concurrent.futures import ThreadPoolExecutor


class DelayedUpdate(DelayedUpdate):
    def step(self):
        self.thread = ThreadPoolExecutor(1)
        super().step()
