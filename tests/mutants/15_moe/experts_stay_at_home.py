"""Experts are left as backward made them.

task: average_gradients
says: it is not reduced
"""

import torch


def average_gradients(dense, experts, world, same):
    for p in dense:
        if p.requires_grad:
            total = torch.zeros_like(p) if p.grad is None else p.grad.contiguous()
            world.all_reduce(total)
            p.grad = total / world.size
