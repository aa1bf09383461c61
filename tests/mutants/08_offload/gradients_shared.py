"""The thread works with the gradients that the caller sets to zero.

task: DelayedUpdate
says: which the caller zeroes meanwhile
"""


class DelayedUpdate(DelayedUpdate):
    def step(self):
        self.finish()
        for master, p in zip(self.masters, self.params, strict=True):
            master.grad = None if p.grad is None else p.grad
        self.under_way = self.thread.submit(self.optimizer.step)
