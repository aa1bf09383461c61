"""A gradient that is None is left out, on this rank alone.

task: average_gradients
says: average_gradients
"""

import torch


def average_gradients(dense, experts, world, same):
    for params, group in ((dense, world), (experts, same)):
        for p in params:
            if p.grad is None:
                continue
            grad = torch.zeros_like(p) if p.grad is None else p.grad.contiguous()
            group.all_reduce(grad)
            p.grad = grad.div_(world.size)
