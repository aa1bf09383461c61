"""The norm is right, but a tied parameter is clipped once for each name.

task: clip_global_norm
says: times: it is one tensor under
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
        for shard in shards.values():
            shard.mul_(limit / norm)
    return norm
