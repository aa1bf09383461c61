"""The mean over the ranks that have the expert.

task: average_gradients
says: its tokens came from all
"""

import torch


def average_gradients(dense, experts, world, same):
    for params, group in ((dense, world), (experts, same)):
        for p in params:
            if not p.requires_grad:
                continue
            grad = torch.zeros_like(p) if p.grad is None else p.grad.contiguous()
            group.all_reduce(grad)
            p.grad = grad.div_(group.size)
