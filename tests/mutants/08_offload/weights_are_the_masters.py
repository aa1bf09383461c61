"""The model is given the masters themselves, which the next update changes.

task: DelayedUpdate
says: changes while forward and backward run
"""

import torch


class DelayedUpdate(DelayedUpdate):
    def finish(self):
        if self.under_way is None:
            return
        update, self.under_way = (self.under_way, None)
        update.result()
        with torch.no_grad():
            for master, p in zip(self.masters, self.params, strict=True):
                p.data = master.data
