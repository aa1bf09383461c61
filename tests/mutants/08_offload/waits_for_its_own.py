"""step() begins the update in a thread, and waits for it.

task: DelayedUpdate
says: step() waits for the update that it begins
"""


class DelayedUpdate(DelayedUpdate):
    def step(self):
        self.finish()
        for master, p in zip(self.masters, self.params, strict=True):
            master.grad = None if p.grad is None else p.grad.clone()
        self.under_way = self.thread.submit(self.optimizer.step)
        self.finish()
