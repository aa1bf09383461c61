"""What any row reads is gathered for every row, and masked.

task: sparse_forward
says: reads block
"""

import torch
from torch import Tensor


def sparse_forward(q: Tensor, k: Tensor, v: Tensor, layout: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    length, b = len(q), len(q) // len(layout)
    cols = layout.any(0).nonzero().flatten()
    there = (cols[:, None] * b + torch.arange(b)).flatten()
    out, lse = torch.zeros_like(q), torch.full((length,), -torch.inf)
    for row, line in enumerate(layout):
        here = torch.arange(row * b, row * b + b)
        mask = line[cols].repeat_interleave(b).expand(b, -1)
        mask = mask & (there <= here[:, None]) if causal else mask
        scores = (q[here] @ k[there].T / q.shape[1] ** 0.5).masked_fill(~mask, -torch.inf)
        lse[here] = scores.logsumexp(-1)
        out[here] = (scores - lse[here].clamp_min(-1e30)[:, None]).exp() @ v[there]
    return out, lse
