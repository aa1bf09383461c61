"""A parameter without a gradient is updated by that of an earlier step.

task: DelayedUpdate
says: is given an old one
"""


class DelayedUpdate(DelayedUpdate):
    def step(self):
        self.finish()
        for master, p in zip(self.masters, self.params, strict=True):
            if p.grad is not None:
                master.grad = p.grad.clone()
        self.under_way = self.thread.submit(self.optimizer.step)
