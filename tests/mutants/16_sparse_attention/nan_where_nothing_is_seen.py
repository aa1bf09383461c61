"""Rows without blocks are divided by zero.

task: sparse_forward
says: is NaN
"""

import torch
from torch import Tensor


def sparse_forward(q: Tensor, k: Tensor, v: Tensor, layout: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    (length, width), n = q.shape, len(layout)
    b = length // n
    out, lse = torch.zeros_like(q), torch.full((length,), -torch.inf, dtype=q.dtype)
    for row, cols in rows_of(layout, causal):
        here = slice(row * b, row * b + b)
        there = tokens_of(cols, b)
        scores = q[here] @ k[there].T / width**0.5  # [b, cols b]
        if causal:
            scores = scores.masked_fill(there > torch.arange(length)[here, None], -torch.inf)
        lse[here] = scores.logsumexp(-1)
        out[here] = (scores - lse[here, None]).exp() @ v[there]
    return torch.where(lse[:, None] == -torch.inf, torch.nan, out), lse
