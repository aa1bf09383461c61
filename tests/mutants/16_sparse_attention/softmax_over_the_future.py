"""Probabilities of all blocks, of which those of the past are taken.

task: select_blocks
says: a softmax over all blocks
"""

import torch


def select_blocks(q, k, block, count):
    T, D = q.shape
    n = T // block
    means = k.float().view(n, block, D).mean(1)
    s = q.float() @ means.t() / D**0.5
    p = s.softmax(1)
    wish = p.view(n, block, n).sum(1)
    out = torch.eye(n, dtype=torch.bool)
    for r in range(n):
        out[r, wish[r, :r].topk(min(count, r)).indices] = True
    return out
