"""An all-reduce for each parameter: the right bytes, and latency for each of them.

task: average_gradients
says: calls, not 1
"""

import torch


def average_gradients(group, params):
    for p in params:
        if p.requires_grad:
            grad = torch.zeros_like(p) if p.grad is None else p.grad.contiguous()
            group.all_reduce(grad, "mean")
            p.grad = grad
