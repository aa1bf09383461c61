"""A rank clips where the norm of one of its own shards exceeds the limit.

task: clip_global_norm
says: it is not clipped
"""

import torch


def clip_global_norm(group, shards, limit):
    once = list({id(shard): shard for shard in shards.values()}.values())
    squares = torch.zeros(1, dtype=torch.float64)
    for shard in once:
        squares += shard.double().pow(2).sum()
    group.all_reduce(squares)
    norm = squares.sqrt().item()
    if once and max(float(s.double().norm()) for s in once) > limit:
        for shard in once:
            shard.mul_(limit / norm)
    return norm
