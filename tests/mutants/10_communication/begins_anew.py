"""q is never kept.

task: power_sgd
says: it is as before
"""

import torch


def power_sgd(grad, error, q, group):
    whole = grad + error
    p = whole @ q
    group.all_reduce(p)
    p = torch.linalg.qr(p)[0]
    new = whole.T @ p
    group.all_reduce(new)
    mean = p @ (new / group.size).T
    error.copy_(whole - mean)
    return mean
