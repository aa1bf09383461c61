"""T of all ranks together.

task: agreed_capacity
says: all ranks' tokens, added
"""

import math

import torch


def agreed_capacity(tokens, experts, k, factor, group):
    most = torch.tensor([tokens])
    group.all_reduce(most)
    return math.ceil(factor * k * int(most) / experts)
