"""The gradients of the last step are kept.

task: MasterWeights
says: 12 bytes a parameter
"""

import torch


class MasterWeights(MasterWeights):
    @torch.no_grad()
    def step(self, grads):
        for master, grad in zip(self.masters, grads, strict=True):
            master.grad = grad
        self.optimizer.step()
        self.last = grads
        for p, master in zip(self.params, self.masters, strict=True):
            p.copy_(master)
            master.grad = p.grad = None
