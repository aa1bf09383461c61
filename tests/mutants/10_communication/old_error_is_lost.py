"""What the gradient alone has beyond the result.

task: power_sgd
says: grad + the old error is what was to be sent
"""

import torch


def power_sgd(grad, error, q, group):
    whole = grad + error
    p = whole @ q
    group.all_reduce(p)
    p = torch.linalg.qr(p)[0]
    new = whole.T @ p
    group.all_reduce(new)
    q.copy_(new / group.size)
    mean = p @ q.T
    error.copy_(grad - mean)
    return mean
