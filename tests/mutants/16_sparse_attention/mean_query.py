"""The mean query's scores.

task: select_blocks
says: not the scores of their mean
"""

import torch
from torch import Tensor


def select_blocks(q: Tensor, k: Tensor, block: int, count: int) -> Tensor:
    n = len(q) // block
    wish = q.view(n, block, -1).mean(1) @ k.view(n, block, -1).mean(1).T
    past = torch.ones(n, n, dtype=torch.bool).tril(-1)
    best = wish.masked_fill(~past, -torch.inf).topk(min(count, n), -1).indices
    return torch.zeros(n, n, dtype=torch.bool).scatter(1, best, True) & past | torch.eye(n, dtype=torch.bool)
