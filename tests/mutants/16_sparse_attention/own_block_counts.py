"""The own block is one of those selected.

task: select_blocks
says: it comes besides them
"""

import torch
from torch import Tensor


def select_blocks(q: Tensor, k: Tensor, block: int, count: int) -> Tensor:
    (length, width), n = q.shape, len(q) // block
    means = k.view(n, block, width).mean(1)
    before = torch.arange(n) < torch.arange(length)[:, None] // block  # [T, n]
    scores = (q @ means.T / width**0.5).masked_fill(~before, -torch.inf)
    wish = scores.softmax(-1).nan_to_num(0).view(n, block, n).sum(1)  # [n, n]
    past = torch.ones(n, n, dtype=torch.bool).tril(-1)
    best = wish.masked_fill(~past, -1).topk(max(0, min(count, n) - 1), -1).indices
    return torch.zeros(n, n, dtype=torch.bool).scatter(1, best, True) & past | torch.eye(n, dtype=torch.bool)
