"""Block by block, and a query's gradient is that of the last block that it reads.

task: sparse_backward
says: the last block that a row reads overwrites the others
"""

import torch


def sparse_backward(q, k, v, out, lse, out_grad, layout, causal):
    length, width = q.shape
    b = length // len(layout)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    d = (out_grad * out).sum(-1, keepdim=True)
    for row, cols in rows_of(layout, causal):
        here = slice(row * b, row * b + b)
        for col in cols.tolist():
            there = slice(col * b, col * b + b)
            p = (q[here] @ k[there].T / width**0.5 - lse[here, None]).exp()
            if causal and col == row:
                p = p.tril()
            dv[there] += p.T @ out_grad[here]
            ds = p * (out_grad[here] @ v[there].T - d[here]) / width**0.5
            dq[here] = ds @ k[there]
            dk[there] += ds.T @ q[here]
    return dq, dk, dv
