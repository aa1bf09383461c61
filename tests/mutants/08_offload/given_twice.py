"""A second finish() gives the old weights once more.

task: DelayedUpdate
says: a second finish() changes the weights
"""

import torch


class DelayedUpdate(DelayedUpdate):
    def finish(self):
        if self.under_way is None:
            return
        update = self.under_way
        update.result()
        with torch.no_grad():
            for master, p in zip(self.masters, self.params, strict=True):
                p.copy_(master)
