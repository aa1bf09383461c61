"""Gradients are rounded to the parameter's dtype first.

task: MasterWeights
says: the gradient was rounded to 16 bits first
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
        for master, grad, p in zip(self.masters, grads, self.params, strict=False):
            master.grad = grad.to(p.dtype).float()
        self.optimizer.step()
        for p, master in zip(self.params, self.masters, strict=True):
            p.copy_(master)
            master.grad = p.grad = None
