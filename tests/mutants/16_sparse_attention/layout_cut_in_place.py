"""The future is cut off in the caller's layout.

task: sparse_backward
says: layout was changed
"""

import torch
from torch import Tensor


def sparse_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, out_grad: Tensor, layout: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    if causal:
        layout &= torch.ones_like(layout).tril()
    (length, width), n = q.shape, len(layout)
    b = length // n
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    d = (out_grad * out).sum(-1, keepdim=True)
    for row, cols in rows_of(layout, causal):
        here = slice(row * b, row * b + b)
        there = tokens_of(cols, b)
        p = (q[here] @ k[there].T / width**0.5 - lse[here, None]).exp()
        if causal:
            p = p.masked_fill(there > torch.arange(length)[here, None], 0)
        dv[there] += p.T @ out_grad[here]
        ds = p * (out_grad[here] @ v[there].T - d[here]) / width**0.5
        dq[here] = ds @ k[there]
        dk[there] += ds.T @ q[here]
    return dq, dk, dv
