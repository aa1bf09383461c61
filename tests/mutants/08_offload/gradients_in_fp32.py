"""Gradients go to the masters in fp32.

task: DelayedUpdate
says: attempting to assign a gradient
"""


class DelayedUpdate(DelayedUpdate):
    def step(self):
        self.finish()
        for master, p in zip(self.masters, self.params, strict=True):
            master.grad = None if p.grad is None else p.grad.float().clone()
        self.under_way = self.thread.submit(self.optimizer.step)
