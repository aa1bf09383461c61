"""Both names of a tied parameter count.

task: clip_global_norm
says: the tied parameter is counted twice: it is one tensor under two names
"""

import torch


def clip_global_norm(group, shards, limit):
    once = list(shards.values())
    squares = torch.zeros(1, dtype=torch.float64)
    for shard in once:
        squares += shard.double().pow(2).sum()
    group.all_reduce(squares)
    norm = squares.sqrt().item()
    if norm > limit:
        for shard in once:
            shard.mul_(limit / norm)
    return norm
