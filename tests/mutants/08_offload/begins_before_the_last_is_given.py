"""The next update is handed to the thread before the masters of the last are copied: it may change them meanwhile.

task: DelayedUpdate
says: the next update begins before the masters are copied to the model
"""


class DelayedUpdate(DelayedUpdate):
    def step(self):
        gradients = [None if p.grad is None else p.grad.clone() for p in self.params]

        def work():
            for master, gradient in zip(self.masters, gradients, strict=True):
                master.grad = gradient
            self.optimizer.step()

        begun = self.thread.submit(work)
        self.finish()
        self.under_way = begun
