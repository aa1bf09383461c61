"""A gradient that is not contiguous is copied, the copy is summed, and the gradient itself divided.

task: average_gradients
says: this rank's own, divided: it is not reduced, or what a copy became is not put into p.grad
"""

import torch


def average_gradients(dense, experts, world, same):
    for params, group in ((dense, world), (experts, same)):
        for p in params:
            if not p.requires_grad:
                continue
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            group.all_reduce(p.grad.contiguous())
            p.grad /= world.size
