"""The update runs in step() itself.

task: DelayedUpdate
says: the update runs in the caller's own time
"""


class DelayedUpdate(DelayedUpdate):
    def step(self):
        self.finish()
        for master, p in zip(self.masters, self.params, strict=True):
            master.grad = None if p.grad is None else p.grad.clone()
        self.optimizer.step()
        self.under_way = self.thread.submit(int)
