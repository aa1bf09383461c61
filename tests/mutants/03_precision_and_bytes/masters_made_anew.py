"""The masters are read back from the rounded parameters at every step, so that what was rounded away is lost.

task: MasterWeights
says: the weights never moved
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
        for p, master, grad in zip(self.params, self.masters, grads, strict=True):
            master.copy_(p)
            master.grad = grad
        self.optimizer.step()
        for p, master in zip(self.params, self.masters, strict=True):
            p.copy_(master)
            master.grad = p.grad = None
