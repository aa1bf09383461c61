"""Made dense before it is sent.

task: sparse_mean
says: a dense vector is all-reduced
"""

import torch


def sparse_mean(values, indices, n, group):
    whole = torch.zeros(n)
    whole[indices.long()] = values.float()
    group.all_reduce(whole)
    return whole / group.size
