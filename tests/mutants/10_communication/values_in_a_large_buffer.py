"""The values are a view of a buffer as long as the gradient.

task: top_k
says: values is a view
"""

import torch


def top_k(grad, error, k):
    n = grad.numel()
    k = min(k, n)
    total = grad.float() + error
    order = torch.sort(total.abs(), descending=True, stable=True).indices[:k]
    idx = order.sort().values
    whole = torch.zeros_like(grad)
    whole[:k] = total[idx].to(grad.dtype)
    values = whole[:k]
    error.copy_(total)
    error[idx] -= values.float()
    return (values, idx.to(torch.int32))
