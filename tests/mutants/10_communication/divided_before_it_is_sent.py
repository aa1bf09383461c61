"""Each value is divided by the ranks before it travels.

task: sparse_mean
says: divided before it is sent, which rounds in bf16
"""

import torch


def sparse_mean(values, indices, n, group):
    k = len(values)
    v, i = values.new_empty(group.size * k), indices.new_empty(group.size * k)
    group.all_gather(v, (values / group.size).to(values.dtype))
    group.all_gather(i, indices)
    return torch.zeros(n).index_add_(0, i.long(), v.float())
