"""Every rank receives all of the mean gradient, and reads its part.

task: ShardedOptimizer
says: uses all_reduce, expected only reduce_scatter, all_gather
"""

import torch


class ShardedOptimizer(ShardedOptimizer):
    @torch.no_grad()
    def step(self):
        grads, at = (torch.zeros_like(self.flat), 0)
        for p in self.params:
            if p.grad is not None:
                grads[at : at + p.numel()].view(p.shape).copy_(p.grad)
            p.grad = None
            at += p.numel()
        self.mine.grad = torch.empty_like(self.mine)
        self.group.all_reduce(grads, "mean")
        self.mine.grad.copy_(grads.view(self.group.size, -1)[self.group.rank])
        self.optimizer.step()
        self.mine.grad = None
        self.group.all_gather(self.flat, self.mine.detach())
