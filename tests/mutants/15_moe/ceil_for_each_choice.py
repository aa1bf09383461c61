"""Each of the k choices is rounded up.

task: agreed_capacity
says: rounded up for each choice
"""

import math

import torch


def agreed_capacity(tokens, experts, k, factor, group):
    most = torch.tensor(tokens)
    group.all_reduce(most, op="max")
    return k * math.ceil(factor * int(most) / experts)
