"""Each step gives the parameters new memory, and views of the old one see no step.

task: MasterWeights
says: a parameter has new memory
"""

import torch
from torch import nn


class MasterWeights:
    def __init__(self, params, make_optimizer):
        self.params = list(params)
        self.masters = [nn.Parameter(p.detach().float()) for p in self.params]
        self.optimizer = make_optimizer(self.masters)

    @torch.no_grad()
    def step(self, grads):
        for master, grad in zip(self.masters, grads, strict=True):
            master.grad = grad
        self.optimizer.step()
        for p, master in zip(self.params, self.masters, strict=True):
            p.data = master.to(p.dtype)
            master.grad = p.grad = None
