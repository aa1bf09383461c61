"""Recursive doubling from the first round on.

task: halving_all_reduce
says: the way back begins with the first round again
"""

import torch


def halving_all_reduce(x, group):
    here, taken = (x, [])
    for i in range(group.size.bit_length() - 1):
        parts = list(here.tensor_split([(len(here) + 1) // 2]))
        keep = group.rank >> i & 1
        arriving = torch.empty_like(parts[keep])
        other = group.rank ^ 1 << i
        group.send_recv(parts[1 - keep], other, arriving, other)
        here = parts[keep].add_(arriving)
        taken.append((other, parts[keep], parts[1 - keep]))
    for other, mine, theirs in taken:
        group.send_recv(mine, other, theirs, other)
