"""p is exp(scores) divided by exp(lse).

task: sparse_backward
says: p = exp(scores - lse)
"""

import math

import torch


def sparse_backward(q, k, v, out, lse, out_grad, layout, causal):
    T, D = q.shape
    b = T // len(layout)
    dq, dk, dv = (torch.zeros(T, D), torch.zeros(T, D), torch.zeros(T, D))
    d = (out_grad * out).sum(1)
    for row, cols in rows_of(layout, causal):
        i = slice(row * b, (row + 1) * b)
        j = tokens_of(cols, b)
        s = q[i] @ k[j].T / math.sqrt(D)
        if causal:
            s = s.masked_fill(j[None] > torch.arange(row * b, (row + 1) * b)[:, None], -math.inf)
        p = s.exp() / lse[i, None].exp()
        dv[j] += p.T @ out_grad[i]
        ds = p * (out_grad[i] @ v[j].T - d[i, None])
        dq[i] = ds @ k[j] / math.sqrt(D)
        dk[j] += ds.T @ q[i] / math.sqrt(D)
    return (dq, dk, dv)
