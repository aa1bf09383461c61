"""Each step gives the parameters new memory, and views of the old one see no step.

task: MasterWeights
says: a parameter has new memory
"""

import torch


class MasterWeights(MasterWeights):
    @torch.no_grad()
    def step(self, grads):
        for master, grad in zip(self.masters, grads, strict=True):
            master.grad = grad
        self.optimizer.step()
        for p, master in zip(self.params, self.masters, strict=True):
            p.data = master.to(p.dtype)
            master.grad = p.grad = None
