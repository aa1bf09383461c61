"""finish() ends the thread, and no step can follow it.

task: DelayedUpdate
says: cannot schedule new futures after shutdown
"""


class DelayedUpdate(DelayedUpdate):
    def step(self):
        self.end()
        for master, p in zip(self.masters, self.params, strict=True):
            master.grad = None if p.grad is None else p.grad.clone()
        self.under_way = self.thread.submit(self.optimizer.step)

    def end(self):
        super().finish()

    def finish(self):
        self.end()
        if hasattr(self.thread, "shutdown"):
            self.thread.shutdown()
