"""All scores and a mask, and NaN put away.

task: sparse_forward
says: none may have more than
"""

import torch
from torch import Tensor


def sparse_forward(q: Tensor, k: Tensor, v: Tensor, layout: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    b = len(q) // len(layout)
    mask = layout.repeat_interleave(b, 0).repeat_interleave(b, 1)
    mask = mask.tril() if causal else mask
    scores = (q @ k.nan_to_num(0).T / q.shape[1] ** 0.5).masked_fill(~mask, -torch.inf)
    lse = scores.logsumexp(-1)
    p = (scores - lse.masked_fill(lse == -torch.inf, 0)[:, None]).exp()
    return p @ v.nan_to_num(0), lse
