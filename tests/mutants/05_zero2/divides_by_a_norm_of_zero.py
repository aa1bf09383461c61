"""The factor is computed also for gradients that are all zero.

task: clip_global_norm
says: ZeroDivisionError
"""

import torch


def clip_global_norm(group, shards, limit):
    once = list({id(shard): shard for shard in shards.values()}.values())
    squares = torch.zeros(1, dtype=torch.float64)
    for shard in once:
        squares += shard.double().pow(2).sum()
    group.all_reduce(squares)
    norm = squares.sqrt().item()
    for shard in once:
        shard.mul_(min(1.0, limit / norm))
    return norm
