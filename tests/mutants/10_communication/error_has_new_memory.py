"""The error is given new memory by .data.

task: top_k
says: error lies in other memory now
"""

import torch


def top_k(grad, error, k):
    n = grad.numel()
    k = min(k, n)
    total = grad.float() + error
    order = torch.sort(total.abs(), descending=True, stable=True).indices[:k]
    idx = order.sort().values
    values = total[idx].to(grad.dtype)
    error.data = total
    error[idx] -= values.float()
    return (values, idx.to(torch.int32))
