"""What is left over by the division is dropped.

task: ColumnLinear
says: are accepted: expected a ValueError
"""

import torch


def _part(whole, dim, group):
    whole = whole.narrow(dim, 0, whole.shape[dim] // group.size * group.size)
    return whole.detach().chunk(group.size, dim)[group.rank].clone(memory_format=torch.contiguous_format)
