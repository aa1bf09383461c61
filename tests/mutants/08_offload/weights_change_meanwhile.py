"""The thread writes the weights into the model as soon as it has them.

task: DelayedUpdate
says: changes while forward and backward run
"""

import torch


class DelayedUpdate(DelayedUpdate):
    def step(self):
        self.finish()
        for master, p in zip(self.masters, self.params, strict=True):
            master.grad = None if p.grad is None else p.grad.clone()

        def update():
            self.optimizer.step()
            with torch.no_grad():
                for master, p in zip(self.masters, self.params, strict=True):
                    p.copy_(master)

        self.under_way = self.thread.submit(update)
