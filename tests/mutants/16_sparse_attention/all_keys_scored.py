"""Every key is scored, and the probabilities are added up by block.

task: select_blocks
says: none may have more than
"""

import torch
from torch import Tensor


def select_blocks(q: Tensor, k: Tensor, block: int, count: int) -> Tensor:
    (length, width), n = q.shape, len(q) // block
    before = torch.arange(n) < torch.arange(length)[:, None] // block  # [T, n]
    scores = ((q @ k.T).view(length, n, block).mean(2) / width**0.5).masked_fill(~before, -torch.inf)
    wish = scores.softmax(-1).nan_to_num(0).view(n, block, n).sum(1)  # [n, n]
    past = torch.ones(n, n, dtype=torch.bool).tril(-1)
    best = wish.masked_fill(~past, -1).topk(min(count, n), -1).indices
    return torch.zeros(n, n, dtype=torch.bool).scatter(1, best, True) & past | torch.eye(n, dtype=torch.bool)
