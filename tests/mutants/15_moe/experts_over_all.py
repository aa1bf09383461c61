"""Experts are reduced as everything else, over all ranks.

task: average_gradients
says: are the experts reduced over all ranks?
"""

import torch


def average_gradients(dense, experts, world, same):
    for params, group in ((dense, world), (experts, world)):
        for p in params:
            if not p.requires_grad:
                continue
            grad = torch.zeros_like(p) if p.grad is None else p.grad.contiguous()
            group.all_reduce(grad)
            p.grad = grad.div_(world.size)
