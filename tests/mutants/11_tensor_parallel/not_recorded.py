"""A collective is called, and autograd sees nothing of it.

task: leave
says: has no gradient to pass on
"""

import torch


def leave(x, group):
    return _total(x.detach(), group)


def _total(x, group):
    total = x.clone(memory_format=torch.contiguous_format)
    group.all_reduce(total)
    return total
