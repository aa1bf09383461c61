"""A token does not see itself.

task: sparse_forward
says: is a token hidden from itself?
"""

import math

import torch


def sparse_forward(q, k, v, layout, causal):
    T, D = q.shape
    b = T // len(layout)
    out, lse = (torch.zeros(T, D), torch.full((T,), -math.inf))
    for row, cols in rows_of(layout, causal):
        i = slice(row * b, (row + 1) * b)
        j = tokens_of(cols, b)
        s = q[i] @ k[j].T / math.sqrt(D)
        if causal:
            s = s.masked_fill(j[None] >= torch.arange(row * b, (row + 1) * b)[:, None], -math.inf)
        lse[i] = torch.logsumexp(s, 1)
        out[i] = (s - lse[i, None]).exp() @ v[j]
    return (out, lse)
