"""The parameters' first values are kept in fp32 too.

task: MasterWeights
says: 12 bytes a parameter
"""

import torch
from torch import nn


class MasterWeights:
    def __init__(self, params, make_optimizer):
        self.params = list(params)
        self.masters = [nn.Parameter(p.detach().float()) for p in self.params]
        self.start = [m.detach().clone() for m in self.masters]
        self.optimizer = make_optimizer(self.masters)

    @torch.no_grad()
    def step(self, grads):
        for master, grad in zip(self.masters, grads, strict=True):
            master.grad = grad
        self.optimizer.step()
        for p, master in zip(self.params, self.masters, strict=True):
            p.copy_(master)
            master.grad = p.grad = None
