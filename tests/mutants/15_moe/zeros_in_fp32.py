"""What has no gradient is given zeros in fp32, whatever its dtype is.

task: average_gradients
says: buffers of different lengths
"""

import torch


def average_gradients(dense, experts, world, same):
    for params, group in ((dense, world), (experts, same)):
        for p in params:
            if not p.requires_grad:
                continue
            grad = torch.zeros(p.shape) if p.grad is None else p.grad.contiguous()
            group.all_reduce(grad)
            p.grad = grad.div_(world.size)
