"""step() also does what zero_grad does.

task: DelayedUpdate
says: step() has taken the .grad of
"""


class DelayedUpdate(DelayedUpdate):
    def step(self):
        super().step()
        for p in self.params:
            p.grad = None
