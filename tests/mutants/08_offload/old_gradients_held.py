"""Remembers the model's own gradients, which the caller has let go.

task: DelayedUpdate
says: with an update under way DelayedUpdate keeps
says: the model's own are the caller's
"""


class DelayedUpdate(DelayedUpdate):
    def step(self):
        handed = [p.grad for p in self.params]
        super().step()
        self.handed = handed
