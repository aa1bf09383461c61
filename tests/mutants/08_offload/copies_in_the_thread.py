"""The thread copies the gradients, when it gets to it.

task: DelayedUpdate
says: the gradients were read in the thread, when they were zeroed
"""


class DelayedUpdate(DelayedUpdate):
    def step(self):
        self.finish()

        def work():
            for master, p in zip(self.masters, self.params, strict=True):
                master.grad = None if p.grad is None else p.grad.clone()
            self.optimizer.step()

        self.under_way = self.thread.submit(work)
