"""Gradients go to the masters in fp32.

task: DelayedUpdate
says: attempting to assign a gradient
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
            master.grad = None if p.grad is None else p.grad.float().clone()
        self.under_way = self.thread.submit(self.optimizer.step)

    def finish(self):
        if self.under_way is None:
            return
        update, self.under_way = (self.under_way, None)
        update.result()
        with torch.no_grad():
            for master, p in zip(self.masters, self.params, strict=True):
                p.copy_(master)
