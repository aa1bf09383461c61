"""Start keeps no more than the 16-bit params can.

task: outer_step
says: rounded to the params' dtype
"""

import torch


def outer_step(params, start, momentum, lr, mu, group):
    with torch.no_grad():
        for p, s, m in zip(params, start, momentum, strict=True):
            mean = p.to(torch.float32, copy=True)
            group.all_reduce(mean)
            d = s - mean / group.size
            m.mul_(mu).add_(d)
            s.sub_(lr * (d + mu * m))
            p.copy_(s)
            s.copy_(p)
