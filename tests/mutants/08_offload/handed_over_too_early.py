"""Gradients are handed over before the update that uses the old ones has ended.

task: DelayedUpdate
says: while the update before still uses its own
"""


class DelayedUpdate(DelayedUpdate):
    def step(self):
        for master, p in zip(self.masters, self.params, strict=True):
            master.grad = None if p.grad is None else p.grad.clone()
        self.finish()
        self.under_way = self.thread.submit(self.optimizer.step)
