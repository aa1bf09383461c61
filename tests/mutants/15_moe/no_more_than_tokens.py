"""No more places than a rank has tokens.

task: agreed_capacity
says: not more than the tokens of a rank
"""

import math

import torch

from refimpl.comm.group import Group


def agreed_capacity(tokens: int, experts: int, k: int, factor: float, group: Group) -> int:
    most = torch.tensor([tokens])
    group.all_reduce(most, op="max")
    return min(int(most), math.ceil(factor * k * int(most) / experts))
