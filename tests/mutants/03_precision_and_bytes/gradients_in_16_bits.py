"""Gradients are rounded to the parameter's dtype first.

task: MasterWeights
says: the gradient was rounded to 16 bits first
"""

import torch


class MasterWeights(MasterWeights):
    @torch.no_grad()
    def step(self, grads):
        for master, grad, p in zip(self.masters, grads, self.params, strict=False):
            master.grad = grad.to(p.dtype).float()
        self.optimizer.step()
        for p, master in zip(self.params, self.masters, strict=True):
            p.copy_(master)
            master.grad = p.grad = None
