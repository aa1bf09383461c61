"""q is given new memory by .data.

task: power_sgd
says: q lies in other memory now
"""

import torch


def power_sgd(grad, error, q, group):
    m = grad + error
    p = m @ q
    group.all_reduce(p)
    p /= group.size
    p, _ = torch.linalg.qr(p)
    q.data = m.t() @ p
    group.all_reduce(q)
    q /= group.size
    out = p @ q.t()
    error.copy_(m - out)
    return out
