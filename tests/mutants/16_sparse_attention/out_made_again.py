"""The result of forward is made again, for the row sums.

task: sparse_backward
says: `out` is given, and need not be made again
"""

import torch


def sparse_backward(q, k, v, out, lse, out_grad, layout, causal):
    length, width = q.shape
    b = length // len(layout)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for row, cols in rows_of(layout, causal):
        here, there = slice(row * b, row * b + b), tokens_of(cols, b)
        scores = q[here] @ k[there].T / width**0.5
        if causal:
            scores = scores.masked_fill(there > torch.arange(length)[here, None], -torch.inf)
        p = scores.softmax(-1)
        d = (out_grad[here] * (p @ v[there])).sum(-1, keepdim=True)
        dv[there] += p.T @ out_grad[here]
        ds = p * (out_grad[here] @ v[there].T - d) / width**0.5
        dq[here] = ds @ k[there]
        dk[there] += ds.T @ q[here]
    return dq, dk, dv
