"""One number for each rank travels, where their sum is enough.

task: clip_global_norm
says: bytes for one norm
"""

import torch


def clip_global_norm(group, shards, limit):
    once = list({id(shard): shard for shard in shards.values()}.values())
    each = torch.zeros(group.size, dtype=torch.float64)
    squares = each[group.rank : group.rank + 1]
    for shard in once:
        squares += shard.double().pow(2).sum()
    group.all_reduce(each)
    squares = each.sum()
    norm = squares.sqrt().item()
    if norm > limit:
        for shard in once:
            shard.mul_(limit / norm)
    return norm
