"""The clipped gradients are new tensors; who holds the old ones sees nothing of it.

task: clip_global_norm
says: clip in place
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
        clipped = {id(s): s * (limit / norm) for s in once}
        for name in list(shards):
            shards[name] = clipped[id(shards[name])]
    return norm
