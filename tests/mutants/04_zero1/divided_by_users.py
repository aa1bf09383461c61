"""A layer is averaged over those ranks alone that used it.

task: ShardedOptimizer
says: ranks that used this layer
"""

import torch


class ShardedOptimizer(ShardedOptimizer):
    @torch.no_grad()
    def step(self):
        grads, at = (torch.zeros_like(self.flat), 0)
        used = torch.tensor([float(p.grad is not None) for p in self.params])
        self.group.all_reduce(used)
        for p, users in zip(self.params, used.tolist(), strict=True):
            if p.grad is not None:
                grads[at : at + p.numel()].view(p.shape).copy_(p.grad * self.group.size / users)
            p.grad = None
            at += p.numel()
        self.mine.grad = torch.empty_like(self.mine)
        self.group.reduce_scatter(self.mine.grad, grads, "mean")
        self.optimizer.step()
        self.mine.grad = None
        self.group.all_gather(self.flat, self.mine.detach())
