"""The optimizer updates the 16-bit parameters themselves.

task: MasterWeights
says: the weights never moved
"""


class MasterWeights:
    def __init__(self, params, make_optimizer):
        self.params = self.masters = list(params)
        self.optimizer = make_optimizer(self.masters)

    def step(self, grads):
        for p, grad in zip(self.params, grads, strict=True):
            p.grad = grad.to(p.dtype)
        self.optimizer.step()
        for p in self.params:
            p.grad = None
