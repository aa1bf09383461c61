"""One number for each rank travels, where one for all is enough.

task: overflowed
says: bytes for one flag
"""

import torch


def overflowed(group, grads):
    bad = any(not bool(torch.isfinite(g).all()) for g in grads)
    flag = torch.zeros(8 * group.size)
    flag[group.rank] = float(bad)
    group.all_reduce(flag, "max")
    return bool(flag.any())
