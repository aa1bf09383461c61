"""fp32 gradients stay alive after the step: 4 bytes a parameter for nothing.

task: MasterWeights
says: keeps its gradient after the step
"""

import torch


class MasterWeights(MasterWeights):
    @torch.no_grad()
    def step(self, grads):
        for master, grad in zip(self.masters, grads, strict=True):
            master.grad = grad
        self.optimizer.step()
        for p, master in zip(self.params, self.masters, strict=True):
            p.copy_(master)
            p.grad = None
