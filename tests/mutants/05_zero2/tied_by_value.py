"""Shards of equal values are taken for one tensor.

task: clip_global_norm
says: two tensors of equal values count once
"""

import torch


def clip_global_norm(group, shards, limit):
    once = list({tuple(shard.tolist()): shard for shard in shards.values()}.values())
    squares = torch.zeros(1, dtype=torch.float64)
    for shard in once:
        squares += shard.double().pow(2).sum()
    group.all_reduce(squares)
    norm = squares.sqrt().item()
    if norm > limit:
        for shard in once:
            shard.mul_(limit / norm)
    return norm
