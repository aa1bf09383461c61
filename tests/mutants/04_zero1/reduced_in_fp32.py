"""bf16 gradients travel in fp32.

task: ShardedOptimizer
says: each reduce_scatter carries 2x the bytes
"""

import torch


class ShardedOptimizer(ShardedOptimizer):
    @torch.no_grad()
    def step(self):
        grads, at = (torch.zeros(len(self.flat)), 0)
        for p in self.params:
            if p.grad is not None:
                grads[at : at + p.numel()].view(p.shape).copy_(p.grad)
            p.grad = None
            at += p.numel()
        mean = torch.empty(len(self.mine))
        self.group.reduce_scatter(mean, grads, "mean")
        self.mine.grad = mean.to(self.mine.dtype)
        self.optimizer.step()
        self.mine.grad = None
        self.group.all_gather(self.flat, self.mine.detach())
