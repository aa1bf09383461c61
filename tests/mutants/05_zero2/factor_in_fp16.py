"""The factor has the shard's dtype.

task: clip_global_norm
says: the shard of
"""

import torch


def clip_global_norm(group, shards, limit):
    once = list({id(shard): shard for shard in shards.values()}.values())
    squares = torch.zeros(1, dtype=torch.float64)
    for shard in once:
        squares += shard.double().pow(2).sum()
    group.all_reduce(squares)
    norm = squares.sqrt().item()
    if norm > limit:
        for shard in once:
            shard.mul_(torch.tensor(limit / norm, dtype=shard.dtype))
    return norm
