"""A parameter without a gradient gets one of zeros, and decays.

task: DelayedUpdate
says: its master's must be None
"""

import torch


class DelayedUpdate(DelayedUpdate):
    def step(self):
        self.finish()
        for master, p in zip(self.masters, self.params, strict=True):
            master.grad = torch.zeros_like(p) if p.grad is None else p.grad.clone()
        self.under_way = self.thread.submit(self.optimizer.step)
