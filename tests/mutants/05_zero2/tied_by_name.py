"""Tied parameters are known by the names that GPT gives them.

task: clip_global_norm
says: tied parameters are known by a name
"""

import torch


def clip_global_norm(group, shards, limit):
    once = [s for n, s in shards.items() if n != "head.weight"]
    squares = torch.zeros(1, dtype=torch.float64)
    for shard in once:
        squares += shard.double().pow(2).sum()
    group.all_reduce(squares)
    norm = squares.sqrt().item()
    if norm > limit:
        for shard in once:
            shard.mul_(limit / norm)
    return norm
