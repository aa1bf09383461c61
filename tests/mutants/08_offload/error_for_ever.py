"""The update that failed is kept, and raises again and again.

task: DelayedUpdate
says: raised by every call from now on
"""

from concurrent.futures import ThreadPoolExecutor

import torch


class DelayedUpdate:
    def __init__(self, params, optimizer):
        self.params = list(params)
        self.masters = [p.detach().clone().requires_grad_() for p in self.params]
        self.optimizer = optimizer(self.masters)
        self.thread = ThreadPoolExecutor(1)
        self.under_way = None

    def step(self):
        self.finish()
        for master, p in zip(self.masters, self.params, strict=True):
            master.grad = None if p.grad is None else p.grad.clone()
        self.under_way = self.thread.submit(self.optimizer.step)

    def finish(self):
        if self.under_way is None:
            return
        self.under_way.result()
        self.under_way = None
        with torch.no_grad():
            for master, p in zip(self.masters, self.params, strict=True):
                p.copy_(master)
