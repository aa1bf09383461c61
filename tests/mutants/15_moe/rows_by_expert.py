"""What arrives is sorted by expert at once.

task: dispatch
says: they lie by expert
"""

import torch


def dispatch(rows, counts, group):
    sizes = torch.empty(group.size, len(counts) // group.size, dtype=torch.int64)
    group.all_to_all(sizes, counts.contiguous())
    there = counts.view(group.size, -1).sum(1).tolist()
    arrived = _moved(rows, there, sizes.sum(1).tolist(), group)
    blocks = arrived.split(sizes.flatten().tolist())
    return (torch.cat([b for e in range(sizes.shape[1]) for b in blocks[e :: sizes.shape[1]]]), sizes)
