"""The whole vector is cut into blocks, so that a rank's part has no whole number of scales: no matter of `splits`.

task: quantized_reduce_scatter
says: is x cut into a chunk a rank, all as long
"""

import torch


def quantized_reduce_scatter(x, block, group):
    q, scales = quantize_blocks(x, block)
    others, theirs = torch.empty_like(q), torch.empty_like(scales)
    group.all_to_all(others, q)
    group.all_to_all(theirs, scales)
    size = len(x) // group.size
    whole = others.float() * theirs.repeat_interleave(block)[: len(x)]
    return whole.view(group.size, size).sum(0)
