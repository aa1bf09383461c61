"""Squares are added up in fp32, which ends at 3.4e38.

task: clip_global_norm
says: the norm
"""

import torch


def clip_global_norm(group, shards, limit):
    once = list({id(shard): shard for shard in shards.values()}.values())
    squares = torch.zeros(1)
    for shard in once:
        squares += shard.float().pow(2).sum()
    group.all_reduce(squares)
    norm = squares.sqrt().item()
    if norm > limit:
        for shard in once:
            shard.mul_(limit / norm)
    return norm
